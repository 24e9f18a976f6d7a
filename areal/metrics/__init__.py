"""What a run reports: ``metrics.jsonl``, TensorBoard, a live view or plain lines, and the reward plot."""
