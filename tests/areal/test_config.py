"""The configuration: what it accepts, what it says about what it refuses, and that it survives being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.config import Config, ConfigError, load_config, load_object, resolved_yaml


def recipe(**changes: Any) -> dict[str, Any]:
    return {"experiment_name": "x", "actor": {"path": "model"}, "train_dataset": {"path": "data"}} | changes


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe()))
    return path


def test_defaults_alone_make_a_run() -> None:
    config = load_config(recipe())
    assert config.run_dir == Path("runs/x/trial0")
    assert config.tokenizer_path == "model"
    assert config.actor.reward_norm is not None
    assert (config.actor.reward_norm.mean_level, config.actor.reward_norm.std_level) == ("group", "group")
    assert config.gconfig.n_samples > 1
    assert config.recover.mode == "auto"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        # unknown keys: the nearest name beside it, or the section that has it
        ("rollout.max_head_offpolicynes=3", ["rollout.max_head_offpolicynes", "3", "'rollout.max_head_offpolicyness'"]),
        ("actor.optimiser.lr=1", ["actor.optimiser", "'actor.optimizer'"]),
        (
            "actor.reward_norm.mean_levl=batch",
            ["actor.reward_norm.mean_levl", "'batch'", "'actor.reward_norm.mean_level'"],
        ),
        ("gconfig.nsamples=4", ["gconfig.nsamples", "'gconfig.n_samples'"]),
        ("actor.max_new_tokens=5", ["actor.max_new_tokens", "5", "'gconfig.max_new_tokens'"]),
        ("rollout.dynamic_bs=true", ["rollout.dynamic_bs", "'dynamic_bs'"]),
        ("max_head_offpolicyness=1", ["'max_head_offpolicyness'", "'rollout.max_head_offpolicyness'"]),
        ("actor.kl_ctl=0.1", ["actor.kl_ctl", "0.1", "section 'actor' has path"]),
        ("+seed=2", ["'+seed'", "'seed'"]),
        # types and ranges
        ("actor.optimizer.lr=fast", ["actor.optimizer.lr = 'fast'", "a number"]),
        ("actor.optimizer.lr=0", ["actor.optimizer.lr = 0", "greater than 0"]),
        ("actor.optimizer.lr=.inf", ["actor.optimizer.lr = inf", "a finite number"]),
        ("gconfig.n_samples=2.5", ["gconfig.n_samples = 2.5", "an integer"]),
        ("gconfig.n_samples=true", ["gconfig.n_samples = True", "an integer"]),
        ("gconfig.n_samples='4'", ["gconfig.n_samples = '4'", "an integer"]),
        ("gconfig.greedy=1", ["gconfig.greedy = 1", "true or false"]),
        ("gconfig.stop=hello", ["gconfig.stop = 'hello'", "a list"]),
        ("gconfig.stop_token_ids=[1,a]", ["gconfig.stop_token_ids.1 = 'a'", "an integer"]),
        ("train_dataset.max_length=1.5", ["train_dataset.max_length = 1.5", "an integer or null"]),
        ("train_dataset.batch_size=0", ["train_dataset.batch_size = 0", "greater than 0"]),
        ("actor.c_clip=1", ["actor.c_clip = 1", "greater than 1"]),
        ("actor.mb_spec=null", ["actor.mb_spec = None", "max_tokens_per_mb"]),
        ("actor.dtype=bf16", ["actor.dtype = 'bf16'", "did you mean 'bfloat16'?"]),
        ("recover.mode=maybe", ["recover.mode = 'maybe'", "'off' or 'auto'"]),
        ("scheduler.type=local", ["scheduler.type = 'local'", "'inline'"]),
        ("gconfig.temperature=0", ["gconfig.temperature = 0", "greedy: true"]),
        ("gconfig.top_k=-1", ["gconfig.top_k = -1", "greater than or equal to 0"]),
        ("workflow=MyWorkflow", ["workflow = 'MyWorkflow'", "package.module.name"]),
        ("experiment_name=a/b", ["experiment_name = 'a/b'", "letters"]),
        ("trial_name=..", ["trial_name = '..'", "letters"]),
        # backends and layouts
        ("rollout.backend=embedded:d2", ["rollout.backend = 'embedded:d2'", "2 processes", "embedded:d1"]),
        ("actor.backend=archon:d2e3", ["actor.backend = 'archon:d2e3'", "e3 does not divide"]),
        ("actor.archon.ac_mode=selective", ["actor.archon.ac_mode = 'selective'", "gradient_checkpointing: true"]),
        ("actor.backend=fsdp:d1", ["actor.backend = 'fsdp:d1'", "'archon'"]),
        ("actor.backend=archon", ["actor.backend = 'archon'", "archon:"]),
        ("rollout.backend=vllm:d1", ["rollout.backend = 'vllm:d1'", "embedded:d1"]),
        # combinations
        ("gconfig.n_samples=1", ["gconfig.n_samples = 1", "actor.reward_norm"]),
        ("actor.rejection_sampling={lower: 6}", ["actor.rejection_sampling", "lower 6.0", "upper 5.0"]),
        ("actor.rejection_sampling={metric: kl_k2, action: clamp}", ["actor.rejection_sampling", "metric: ratio"]),
        ("actor.adv_norm={mean_level: null, mean_leave1out: true}", ["actor.adv_norm", "mean_leave1out"]),
        ("actor.overlong_reward_penalty=true", ["overlong_tokens = None", "overlong_penalty_factor = None"]),
        # how it is written
        ("seed", ["'seed'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("seed=[1", ["seed=[1"]),
        ("tokenizer_path=${actr.path}", ["tokenizer_path", "actr.path"]),
    ],
)
def test_wrong_input_names_key_value_and_way_out(override: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(recipe(), [override])
    message = str(error.value)
    for part in parts:
        assert part in message
    assert "pydantic" not in message and "validation error" not in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["actor.prox_logp_method=reuse", "actor.ppo_n_minibatches=2"], "actor.ppo_n_minibatches = 2"),
        (["actor.rejection_sampling={}", "actor.use_decoupled_loss=false"], "actor.use_decoupled_loss = False"),
        (
            ["rollout.deterministic_sampling=true", "rollout.max_head_offpolicyness=1"],
            "rollout.max_head_offpolicyness = 1",
        ),
        (
            ["actor.overlong_reward_penalty=true", "actor.overlong_tokens=512", "actor.overlong_penalty_factor=1"],
            "actor.overlong_tokens = 512",
        ),
        (["actor.reward_norm=null", "actor.adv_norm={std_level: group}", "gconfig.n_samples=1"], "actor.adv_norm"),
    ],
)
def test_settings_that_cannot_go_together(overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match=part.replace(".", r"\.")):
        load_config(recipe(), overrides)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({}, ["seed=x", "rolout.backend=a"])
    lines = str(error.value).splitlines()
    assert [line.split()[0] for line in lines if "required" in line] == [
        "experiment_name",
        "actor.path",
        "train_dataset.path",
    ]
    assert any("seed = 'x'" in line for line in lines)
    assert any("'rolout'" in line and "'rollout'" in line for line in lines)


def test_one_sample_is_fine_without_a_group_baseline() -> None:
    config = load_config(recipe(), ["gconfig.n_samples=1", "actor.reward_norm=null", "actor.adv_norm={}"])
    assert config.actor.reward_norm is None
    assert config.actor.adv_norm is not None and config.actor.adv_norm.mean_level == "batch"


def test_a_partial_override_refines_the_default_section() -> None:
    norm = load_config(recipe(), ["actor.reward_norm.std_level=null"]).actor.reward_norm
    assert norm is not None and (norm.mean_level, norm.std_level) == ("group", None)


def test_yaml_booleans_and_old_spellings_of_recover_mode(recipe_file: Path) -> None:
    for spelling, mode in {"off": "off", "on": "auto", "disabled": "off", "auto": "auto"}.items():
        recipe_file.write_text(f"{yaml.safe_dump(recipe())}recover: {{mode: {spelling}}}\n")
        assert load_config(recipe_file).recover.mode == mode
        assert load_config(recipe(), [f"recover.mode={spelling}"]).recover.mode == mode


def test_top_k_of_existing_recipes_means_off() -> None:
    assert load_config(recipe(), ["gconfig.top_k=1e8"]).gconfig.top_k == 0
    assert load_config(recipe(), ["gconfig.top_k=50"]).gconfig.top_k == 50


def test_binary_kl_has_its_own_bound_and_warns_above_one() -> None:
    kpop = load_config(recipe(), ["actor.rejection_sampling.metric=binary_kl"]).actor.rejection_sampling
    assert kpop is not None and kpop.upper == 0.1
    with pytest.warns(UserWarning, match=r"actor\.rejection_sampling\.upper = 2\.0"):
        load_config(recipe(), ["actor.rejection_sampling={metric: binary_kl, upper: 2.0}"])
    ratio = load_config(recipe(), ["actor.rejection_sampling={}"]).actor.rejection_sampling
    assert ratio is not None and ratio.upper == 5.0


def test_evaluation_sampling_is_a_copy_with_one_sample() -> None:
    config = load_config(recipe(), ["gconfig.max_new_tokens=64", "gconfig.stop=[END]"])
    assert config.eval_gconfig == config.gconfig.model_copy(update={"n_samples": 1})
    greedy = load_config(recipe(), ["gconfig.max_new_tokens=64", "eval_gconfig.greedy=true"]).eval_gconfig
    assert (greedy.greedy, greedy.max_new_tokens, greedy.n_samples) == (True, 64, 1)


def test_base_file_then_recipe_then_overrides(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    base = recipe(seed=1, gconfig={"n_samples": 4, "max_new_tokens": 10, "temperature": 0.5})
    (tmp_path / "shared" / "base.yaml").write_text(yaml.safe_dump(base))
    refined = tmp_path / "refined.yaml"
    refined.write_text("base: shared/base.yaml\nseed: 2\ngconfig: {max_new_tokens: 20, n_samples: 6}\n")
    config = load_config(refined, ["gconfig.n_samples=8"])
    assert config.seed == 2
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens, config.gconfig.temperature) == (8, 20, 0.5)


def test_broken_files_and_bases(tmp_path: Path, recipe_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*absent\.yaml"):
        load_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("actor: {path: m\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not valid YAML"):
        load_config(broken)
    broken.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="seed"):
        load_config(broken)
    broken.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds a list"):
        load_config(broken)
    broken.write_text("base: absent.yaml\n")
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(broken)
    middle = tmp_path / "middle.yaml"
    middle.write_text(f"base: {recipe_file.name}\n")
    broken.write_text("base: middle.yaml\n")
    with pytest.raises(ConfigError, match=r"base = 'middle\.yaml'.*only one"):
        load_config(broken)


def test_interpolation_reaches_defaults() -> None:
    config = load_config(
        recipe(tokenizer_path="${actor.path}", trial_name="seed${seed}"),
        ["eval_gconfig.max_tokens=${gconfig.max_new_tokens}"],
    )
    assert (config.tokenizer_path, config.trial_name, config.eval_gconfig.max_tokens) == ("model", "seed1", 256)


def test_values_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config(recipe()).seed = 2  # type: ignore[misc]


def test_load_object_says_what_is_missing() -> None:
    assert load_object("reward_fn", "json.dumps").__name__ == "dumps"
    with pytest.raises(ConfigError, match=r"reward_fn = 'no_such_package\.f'.*'no_such_package'"):
        load_object("reward_fn", "no_such_package.f")
    with pytest.raises(ConfigError, match=r"did you mean json\.dumps\?"):
        load_object("reward_fn", "json.dumpss")


def test_defaults_hold_in_python_too() -> None:
    config = Config(experiment_name="x", actor={"path": "model"}, train_dataset={"path": "data"})  # type: ignore[arg-type]
    assert config == load_config(recipe())
    assert yaml.safe_load(resolved_yaml(config))["experiment_name"] == "x"
