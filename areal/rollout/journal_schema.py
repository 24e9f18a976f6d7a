"""Tables of the journal. Change them and the version together."""

from __future__ import annotations

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE run (
    lineage INTEGER PRIMARY KEY, config_digest TEXT NOT NULL, first_step INTEGER NOT NULL,
    reason TEXT NOT NULL, started REAL NOT NULL);
CREATE TABLE prompt (
    place INTEGER PRIMARY KEY,
    id TEXT NOT NULL, epoch INTEGER NOT NULL, position INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'complete', 'trained', 'dropped')),
    reason TEXT, attempts INTEGER NOT NULL DEFAULT 0, leases INTEGER NOT NULL DEFAULT 1, group_id TEXT NOT NULL UNIQUE,
    UNIQUE (epoch, position), UNIQUE (epoch, id));
CREATE INDEX prompt_state ON prompt (state, place);
CREATE TABLE episode (
    id TEXT PRIMARY KEY, group_id TEXT NOT NULL, place INTEGER NOT NULL REFERENCES prompt, sample INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('running', 'complete', 'failed')), reason TEXT);
CREATE INDEX episode_group ON episode (group_id);
CREATE INDEX episode_running ON episode (state) WHERE state = 'running';
CREATE TABLE trajectory (
    id TEXT PRIMARY KEY, episode_id TEXT NOT NULL REFERENCES episode, group_id TEXT NOT NULL,
    place INTEGER NOT NULL REFERENCES prompt, oldest_version INTEGER, newest_version INTEGER, lineage INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('complete', 'trained', 'dropped')), reason TEXT, step INTEGER, blob BLOB);
CREATE INDEX trajectory_place ON trajectory (place);
CREATE INDEX trajectory_group ON trajectory (group_id);
CREATE INDEX trajectory_step ON trajectory (step);
CREATE TABLE batch (
    lineage INTEGER NOT NULL, step INTEGER NOT NULL, trajectory_ids TEXT NOT NULL, seed INTEGER NOT NULL, digest TEXT,
    last_place INTEGER NOT NULL,
    live INTEGER NOT NULL DEFAULT 1, pruned INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (lineage, step));
CREATE UNIQUE INDEX batch_live ON batch (step) WHERE live;
CREATE TABLE checkpoint (step INTEGER PRIMARY KEY, digest TEXT NOT NULL, path TEXT NOT NULL, written REAL NOT NULL);
"""
