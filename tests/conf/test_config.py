"""The strict pass over a config: what is accepted, and how each mistake is put into words."""

import json
from pathlib import Path

import pytest

from mlxrl_runs.config import compose_config, config_hash, expand_points, validate
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.groups import conf_folder, group_choices
from mlxrl_runs.schema import RunConfig

NEEDS_MORE = {  # choices that cannot stand alone, with what they need
    ("model", "local"): ["model.path=MODEL_FOLDER"],
    ("model", "hub"): ["model.path=org/name"],
    ("env", "python"): ["env.file=PYTHON_FILE"],
    ("reward", "exact"): ["env=arithmetic"],
    ("reward", "numeric"): ["env=arithmetic"],
    ("reward", "file"): ["reward.file.path=PYTHON_FILE"],
    ("reward", "regex"): ["reward.regex.pattern=a+"],
}
EVERY_CHOICE = [(group, name) for group, names in group_choices().items() for name in names]


def load(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> RunConfig:
    return validate(compose_config(list(overrides), config_dirs))


def problems(*overrides: str, config_dirs: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, config_dirs=config_dirs)
    assert caught.value.exit_code == 2
    return caught.value.problems


def only_problem(*overrides: str) -> str:
    found = problems(*overrides)
    assert len(found) == 1, found
    return found[0]


def model_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


# ---- what is accepted


@pytest.mark.parametrize(("group", "name"), EVERY_CHOICE)
def test_every_yaml_composes_and_passes(group, name, tmp_path):
    (tmp_path / "my_env.py").write_text("def make(task, seed, group_index): ...\n")
    places = {"MODEL_FOLDER": str(model_folder(tmp_path / "model")), "PYTHON_FILE": str(tmp_path / "my_env.py")}
    more = NEEDS_MORE.get((group, name), [])
    for placeholder, path in places.items():
        more = [override.replace(placeholder, path) for override in more]
    config = load(f"{group}={name}", *more)
    section = config.plain().get(group, {})  # an experiment leaves no section of its own
    assert section.get("name", name) == name


def test_the_groups_of_the_design_are_there():
    assert {"model", "adapter", "env", "algorithm", "rollout", "memory", "optimizer", "tracking"} <= set(
        group_choices()
    )


@pytest.mark.parametrize(
    "typed", ["1e-5", "1e-05", "'1e-5'", '"1e-5"', "0.00001", "1.0e-5"], ids=lambda typed: typed.replace('"', "''")
)
def test_h24_a_small_learning_rate_is_a_float_however_it_is_typed(typed):
    override = f"optimizer.learning_rate={typed}"
    assert load(override).optimizer.learning_rate == 1e-5
    # the same through a sweep: what the sweeper hands on is parsed a second time
    (first, second) = expand_points([f"{override},1e-4"])
    assert load(*first.overrides).optimizer.learning_rate == 1e-5
    assert load(*second.overrides).optimizer.learning_rate == 1e-4


@pytest.mark.parametrize("written", ["1e-5", "1e-05", "'1e-5'", "1.0e-5"])
def test_h24_a_small_learning_rate_in_a_yaml_of_another_tool_is_a_float(written, tmp_path):
    # PyYAML reads and writes 1e-5 as text, for want of a dot
    folder = tmp_path / "optimizer"
    folder.mkdir()
    lines = (conf_folder() / "optimizer" / "adam.yaml").read_text().splitlines()
    changed = [f"learning_rate: {written}" if line.startswith("learning_rate:") else line for line in lines]
    (folder / "mine.yaml").write_text("\n".join(changed))
    assert load("optimizer=mine", config_dirs=(tmp_path,)).optimizer.learning_rate == 1e-5


def test_the_learning_rate_follows_model_and_adapter(tmp_path):
    path = f"model.path={model_folder(tmp_path / 'model')}"
    assert load("adapter=lora").optimizer.learning_rate == load().model.recommended.learning_rate.lora
    assert load("adapter=full").optimizer.learning_rate == load().model.recommended.learning_rate.full
    assert load("model=local", path).optimizer.learning_rate == 1e-5
    assert load("model=local", path, "adapter=full").optimizer.learning_rate == 1e-6


def test_steps_and_lengths_follow_the_environment():
    config = load("env=arithmetic")
    assert config.steps == config.env.recommended.steps
    assert config.rollout.max_completion_tokens == config.env.recommended.max_completion_tokens


def test_lists_texts_and_paths_arrive_as_typed(tmp_path):
    folder = model_folder(tmp_path / "a model")
    config = load(
        "tags=[first,second]", "notes='a/b, c'", "name=team/run", "adapter.targets=[q_proj,v_proj]",
        "model=local", f"model.path='{folder}'", "paths.output=/tmp/some/where",
    )  # fmt: skip
    assert config.tags == ("first", "second")
    assert config.notes == "a/b, c"
    assert config.name == "team/run"
    assert config.adapter.targets == ("q_proj", "v_proj")
    assert config.model.path == str(folder)
    assert config.paths.output == "/tmp/some/where"


def test_a_name_that_looks_like_a_number_stays_text():
    assert load("name=2026").name == "2026"


def test_a_known_key_may_be_forced():
    assert load("++group_size=8").group_size == 8


def test_a_users_own_group_folder_is_searched(tmp_path):
    (tmp_path / "memory").mkdir()
    source = (conf_folder() / "memory" / "default.yaml").read_text()
    (tmp_path / "memory" / "small.yaml").write_text(source.replace("micro_batch_size: 0", "micro_batch_size: 2"))
    assert load("memory=small", config_dirs=(tmp_path,)).memory.micro_batch_size == 2
    assert "small" in only_problem("memory=smal") or "default" in only_problem("memory=smal")
    assert "small" in problems("memory=smal", config_dirs=(tmp_path,))[0]


def test_a_group_of_the_users_own_is_added(tmp_path):
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset" / "short.yaml").write_text("# @package _global_\nsteps: 3\n")
    assert load("+preset=short", config_dirs=(tmp_path,)).steps == 3
    with pytest.raises(ConfigError, match=r"Try \+preset=short"):
        load("preset=short", config_dirs=(tmp_path,))


def test_an_experiment_of_the_users_own_is_chosen_like_ours(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "short.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /env: arithmetic\n  - override /reward: [numeric]\nsteps: 3\n"
    )
    config = load("experiment=short", "group_size=6", config_dirs=(tmp_path,))
    assert (config.steps, config.group_size, config.env.name, list(config.reward)) == (3, 6, "arithmetic", ["numeric"])


@pytest.mark.parametrize("many", [False, True])
def test_a_broken_yaml_is_a_wrong_config_and_names_its_line(many, tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("name: [\n")
    with pytest.raises(ConfigError, match=r"mine.yaml.*line 2"):
        if many:
            expand_points(["env=mine", "seed=1,2"], (tmp_path,))
        compose_config(["env=mine"], (tmp_path,))


def test_a_run_is_named_after_what_it_varies_unless_it_has_a_name():
    assert load("algorithm=grpo", "env=arithmetic", "group_size=8", "seed=3").run_name == "grpo-arithmetic-tiny-G8-s3"
    assert load("name=mine").run_name == "mine"


def test_the_hash_is_of_the_experiment_only():
    plain = config_hash(load())
    assert config_hash(load("name=other", "notes=x", "tags=[a]", "tracking=jsonl", "paths.output=/tmp/x")) == plain
    assert config_hash(load("optimizer.learning_rate=1e-5")) == config_hash(load("optimizer.learning_rate='1e-05'"))
    assert config_hash(load("seed=1")) != plain
    assert config_hash(load("env.recommended.steps=3")) != plain


def test_composing_leaves_a_hydra_of_the_caller_alone():
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder())):
        load("seed=1")
        assert compose("config", ["seed=2"]).seed == 2


# ---- choices and keys that do not exist


def test_an_unknown_choice_lists_the_choices_and_the_nearest():
    line = only_problem("algorithm=gigpoo")
    assert line.startswith("algorithm: got 'gigpoo'") and "Did you mean algorithm=gigpo?" in line
    line = only_problem("env=recuring")
    assert "arithmetic" in line and "Did you mean env=recurring?" in line
    assert "hub, local, " in only_problem("model=tiyn") and "Did you mean model=tiny?" in only_problem("model=tiyn")


def test_a_name_inside_a_group_is_checked_too():
    assert "Did you mean optimizer=adamw?" in only_problem("optimizer.name=adamww")
    assert only_problem("env.name=recurringg").startswith("env: got 'recurringg'")


@pytest.mark.parametrize("override", ["groupsize=8", "+groupsize=8", "++groupsize=8"])
def test_h25_an_unknown_key_is_refused_with_or_without_plus(override):
    line = only_problem(override)
    assert line.startswith("groupsize: no such key. Did you mean group_size?")


def test_a_misspelled_key_in_a_section_is_refused():
    assert "Did you mean rollout.temperature?" in only_problem("++rollout.temprature=0.3")
    assert "Did you mean optimizer.learning_rate?" in only_problem("learning_rate=1e-4")


def test_h25_a_misspelled_key_in_a_yaml_is_refused(tmp_path):
    (tmp_path / "memory").mkdir()
    source = (conf_folder() / "memory" / "default.yaml").read_text()
    (tmp_path / "memory" / "mine.yaml").write_text(source.replace("micro_batch_size", "micro_batchsize"))
    found = problems("memory=mine", config_dirs=(tmp_path,))
    assert any("memory.micro_batchsize: no such key. Did you mean memory.micro_batch_size?" in line for line in found)
    assert any(line.startswith("memory.micro_batch_size: missing") for line in found)


def test_a_key_of_another_choice_names_that_choice():
    assert only_problem("adapter=full", "adapter.rank=4") == (
        "adapter.rank: the chosen adapter has no such key. Try adapter=lora."
    )


def test_a_removed_key_is_missing():
    assert only_problem("~group_size") == "group_size: missing. Try group_size=4."


# ---- values


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("group_size=0", "group_size", ">= 1"),
        ("steps=-1", "steps", ">= 1"),
        ("steps=2.5", "steps", "a whole number"),
        ("steps=true", "steps", "not true"),
        ("seed=-1", "seed", ">= 0"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate", "a finite number >= 0"),
        ("optimizer.learning_rate=inf", "optimizer.learning_rate", "a finite number >= 0"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate", ">= 0"),
        ("optimizer.learning_rate=", "optimizer.learning_rate", "a finite number"),
        ("optimizer.learning_rate=null", "optimizer.learning_rate", "a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas", "a list of 2"),
        ("optimizer.betas=[0.9,1.0]", "optimizer.betas", ">= 0 and < 1"),
        ("optimizer.schedule=cosin", "optimizer.schedule", "constant, linear, cosine"),
        ("rollout.temperature=0", "rollout.temperature", "> 0"),
        ("rollout.top_p=0", "rollout.top_p", "> 0 and <= 1"),
        ("rollout.min_p=1", "rollout.min_p", "< 1"),
        ("rollout.top_k=-1", "rollout.top_k", ">= 0"),
        ("rollout.ignore_eos=maybe", "rollout.ignore_eos", "true or false"),
        ("adapter.rank=0", "adapter.rank", ">= 1"),
        ("adapter.scale=0", "adapter.scale", "> 0"),
        ("adapter.dropout=1", "adapter.dropout", "< 1"),
        ("algorithm.gamma=1.5", "algorithm.gamma", ">= 0 and <= 1"),
        ("algorithm.omega=-1", "algorithm.omega", ">= 0"),
        ("algorithm.kl_coef=-0.1", "algorithm.kl_coef", ">= 0"),
        ("algorithm.clip_high=-0.1", "algorithm.clip_high", ">= 0"),
        ("algorithm.advantage_scaling=gae", "algorithm.advantage_scaling", "group"),
        ("adapter.targets=[]", "adapter.targets", "not empty"),
        ("memory.micro_batch_size=-2", "memory.micro_batch_size", ">= 0"),
        ("budget.minutes=0", "budget.minutes", "> 0 or null"),
        ("budget.tokens=many", "budget.tokens", "a whole number"),
        ("tags=one", "tags", "a list"),
        ("job=trian", "job", "train, evaluate"),
        ("tracking.mode=offfline", "tracking.mode", "auto, online, offline"),
        ("trainer.save_every=-1", "trainer.save_every", ">= 0"),
        ("env.max_turns=0", "env.max_turns", ">= 1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(override, key, allowed):
    line = only_problem(override)
    assert line.startswith(f"{key}: got ") and allowed in line
    assert "Try " in line or "Leave it out" in line


def test_every_problem_is_listed_not_the_first():
    found = problems(
        "group_size=0", "steps=-1", "optimizer.learning_rate=nan", "algorithm=gigpoo", "bogus=1", "seed=1,2"
    )
    starts = {line.split(":")[0] for line in found}
    assert starts == {"group_size", "steps", "optimizer.learning_rate", "algorithm", "bogus", "seed"}


def test_h01_a_group_of_one_has_no_baseline():
    line = only_problem("algorithm=gigpo", "group_size=1")
    assert line.startswith("group_size: got 1; algorithm=gigpo") and "needs at least 2" in line


def test_a_rule_between_keys_speaks_although_another_key_is_wrong():
    starts = [line.split(":")[0] for line in problems("group_size=1", "optimizer.eps=0")]
    assert sorted(starts) == ["group_size", "optimizer.eps"]


def test_several_values_need_multirun():
    assert "Add -m" in only_problem("seed=1,2")


def test_a_value_that_must_be_given_is_asked_for():
    assert only_problem("env=python").startswith("env.file: must be given")


def test_an_interpolation_that_leads_nowhere_names_its_key():
    assert only_problem("notes=${oc.env:MLXRL_NOT_SET}").startswith("notes: got ${oc.env:MLXRL_NOT_SET}")


@pytest.mark.parametrize(
    "value",
    ["~/models", "outputs/sweeps/s/ab12_group_size=4,seed=0/adapters", "Größe", "it's", "(new)", "#1", "a\\", "\\'="],
)
def test_a_value_that_hydras_grammar_does_not_read_arrives_as_typed(value):
    assert validate(compose_config([f"notes={value}"])).notes == value


def test_values_with_odd_letters_can_be_swept():
    points = expand_points(["notes=ä,it's", "seed=1,2"])
    notes = [validate(compose_config(point.overrides)).notes for point in points]
    assert notes == ["ä", "ä", "it's", "it's"]


def test_bytes_that_are_no_text_are_refused():
    assert only_problem("notes=\udcff").endswith("holds bytes that are no text in this terminal's encoding.")


def test_the_name_of_a_group_follows_from_its_choice():
    assert only_problem("env.name=arithmetic") == "env.name: follows from the chosen env. Try env=arithmetic."


def test_a_problem_of_two_forms_is_told_once():
    assert only_problem("env=arithmetic", "env.operators=[x]").startswith("env.operators: got ['x']; allowed: ")


def test_an_override_without_a_key_is_one_problem():
    assert only_problem("=3").startswith("=3: not understood")


def test_a_stop_string_holds_something():
    # every text holds the empty one: each action would end with its first token
    assert only_problem("rollout.stop_strings=['']").startswith("rollout.stop_strings: got ['']; allowed: ")


def test_what_cannot_be_parsed_is_shown():
    assert only_problem("group_size").startswith("group_size: not understood")
    assert only_problem("notes=a{").startswith("notes=a{: not understood")
    assert "section of keys" in only_problem("budget=5")


def test_hydra_cannot_be_told_to_write_elsewhere():
    assert "paths.output" in only_problem("hydra.run.dir=/tmp/x")
    assert "Try -m" in only_problem("hydra.mode=MULTIRUN")


# ---- rules between keys


def test_a_local_model_needs_a_whole_folder(tmp_path):
    assert "model=local needs a model folder" in only_problem("model=local")
    assert "is no folder" in only_problem("model=local", f"model.path={tmp_path / 'nowhere'}")
    assert "no config.json and no model*.safetensors" in only_problem("model=local", f"model.path={tmp_path}")
    (tmp_path / "config.json").write_text("{}")
    line = only_problem("model=local", f"model.path={tmp_path}")
    assert "has no model*.safetensors" in line and "config.json" not in line


def test_a_path_alone_chooses_the_kind_of_model(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "my model")
    assert load(f"model.path='{folder}'").model.source == "local"
    assert load("model.path=org/name").model.source == "hub"
    monkeypatch.chdir(tmp_path)
    assert load("model.path='my model'").model.source == "local"
    assert load("model.path='./my model'").model.source == "local"
    assert "./nowhere is no folder" in only_problem("model.path=./nowhere")
    # whoever says model= means it
    assert "model=tiny has no path" in only_problem("model=tiny", "model.path=org/name")
    points = expand_points(["model.path=org/name,'./my model'"])
    assert [load(*point.overrides).model.source for point in points] == ["hub", "local"]


def test_a_run_is_named_after_the_model_that_a_path_names(tmp_path):
    assert load("model.path=mlx-community/Qwen3-0.6B-4bit").run_name == "gigpo-recurring-Qwen3-0.6B-4bit-G4-s0"
    assert load(f"model.path='{model_folder(tmp_path / 'my model')}/'").run_name == "gigpo-recurring-my-model-G4-s0"
    assert load("model=qwen3_0_6b_4bit").run_name == "gigpo-recurring-qwen3_0_6b_4bit-G4-s0"
    assert load().run_name == "gigpo-recurring-tiny-G4-s0"


def test_a_local_model_stays_the_one_it_was_when_a_link_moves_on(tmp_path):
    folder = model_folder(tmp_path / "first")
    (tmp_path / "latest").symlink_to(folder)
    assert load(f"model.path={tmp_path / 'latest'}").model.path == str(folder)


def test_a_hub_model_needs_a_name_and_takes_its_revision_apart():
    assert "needs a name on the Hugging Face hub" in only_problem("model=hub")
    assert "needs a name" in only_problem("model=hub", "model.path=a/b/c")
    assert "Try model.path=org/name model.revision=abc" in only_problem("model=hub", "model.path='org/name@abc'")
    assert load("model.path=org/name", "model.revision=abc").model.revision == "abc"
    assert "only models of the hub" in only_problem("model.revision=abc")


def test_an_initial_adapter_must_be_there_and_only_low_rank_adapters_have_one(tmp_path):
    assert "has no adapters.safetensors and no adapter_config.json" in only_problem(f"adapter.init={tmp_path}")
    assert "the chosen adapter has no such key" in only_problem("adapter=full", f"adapter.init={tmp_path}")
    (tmp_path / "adapters.safetensors").touch()
    (tmp_path / "adapter_config.json").touch()
    config = load("adapter=dora", f"adapter.init={tmp_path}", "adapter.reference=base")
    assert (config.adapter.init, config.adapter.reference) == (str(tmp_path), "base")
    assert "start" in only_problem("adapter.reference=begin")


def test_quantised_weights_are_refused_for_full_training_before_they_are_loaded():
    assert "Try adapter=lora" in only_problem("model.precision=4bit", "adapter=full")
    assert "Try adapter=lora" in only_problem("model=smollm2_135m", "model.precision=stored", "adapter=full")
    assert load("model=smollm2_135m", "adapter=full").optimizer.learning_rate == 1e-5


def test_paths_and_shapes_belong_to_their_models():
    assert "Try model=local" in only_problem("model=tiny", "model.path=/tmp")
    assert "only model=random has a shape" in only_problem("model=tiny", "model.shape=11m")
    assert "one of 1m, 11m" in only_problem("model=random", "model.shape=null")
    assert "one of 1m, 11m" in only_problem("model=random", "model.shape=11g")


def test_how_often_layers_are_checkpointed_is_below_the_depth_of_the_model(tmp_path):
    wanted = [("none", 0), ("layer", 1), ("every_2", 2), ("every_3", 3)]
    assert [load(f"memory.checkpoint={name}").memory.checkpoint_every for name, _ in wanted] == [n for _, n in wanted]
    assert load("memory.checkpoint=every_12", "model=random", "model.shape=qwen3_4b").memory.checkpoint_every == 12
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"text_config": {"num_hidden_layers": 2}}')
    for overrides, allowed in [
        ([], "none, layer, or every_k with k from 2 to 3"),
        ([f"model.path={folder}"], "none, layer"),
    ]:
        found = only_problem("memory.checkpoint=every_4", *overrides)
        assert (
            found.startswith("memory.checkpoint: got every_4, but this model has ") and f"allowed: {allowed}." in found
        )
    for wrong in ("every_1", "every_", "every_2x", "layers", "null"):
        assert "allowed: none, layer, or every_k" in only_problem(f"memory.checkpoint={wrong}")


def test_a_checkpoint_is_for_evaluation_and_for_the_check(tmp_path):
    assert "only job=evaluate and job=check read it" in only_problem(f"checkpoint={tmp_path}")
    assert "is no folder" in only_problem("job=evaluate", f"checkpoint={tmp_path / 'nowhere'}")
    for job in ("evaluate", "check"):
        assert load(f"job={job}", f"checkpoint={tmp_path}").checkpoint == str(tmp_path)


def test_an_episode_must_hold_an_answer():
    assert only_problem("rollout.max_completion_tokens=4096").startswith("rollout.max_episode_tokens: got 4096")
    assert load("rollout.max_completion_tokens=4095").rollout.max_completion_tokens == 4095


# ---- secrets


@pytest.mark.parametrize(
    "override",
    [
        "+wandb.api_key=DUMMY-KEY-123",
        "wandb.api_key=DUMMY-KEY-123",
        "+tracking.api_key=DUMMY-KEY-123",
        "+wandb={api_key: DUMMY-KEY-123}",
        "+hub_token=DUMMY-KEY-123",
        "+password='DUMMY-KEY-123'",
        "hydra.job.env_set.WANDB_API_KEY=DUMMY-KEY-123",
        "wandb.api_key=DUMMY-KEY-123 {",
        "+wandb.api_key=DUMMY-KEY-123,DUMMY-KEY-123b",
    ],
)
def test_a_secret_is_refused_and_never_printed(override):
    found = problems(override, "steps=-1")
    assert "DUMMY-KEY-123" not in "\n".join(found)
    assert any("WANDB_API_KEY instead" in line or "<hidden>: not understood" in line for line in found)
    with pytest.raises(ConfigError) as caught:
        expand_points([override, "seed=1,2"])
        problems(override)
    assert "DUMMY-KEY-123" not in str(caught.value)


def test_a_refused_secret_says_what_to_do():
    assert "environment variable WANDB_API_KEY" in only_problem("+wandb.api_key=DUMMY-KEY-123")


@pytest.mark.parametrize("key", ["notes", "steps", "tracking.entity"])
def test_a_secret_of_the_environment_does_not_get_in_by_interpolation(key, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "DUMMY-KEY-123")
    found = problems(f"{key}=${{oc.env:WANDB_API_KEY}}")
    assert any(line.startswith(f"{key}: secrets are not accepted") for line in found)
    assert "DUMMY-KEY-123" not in "\n".join(found)


def test_token_counts_are_no_secrets():
    assert load("budget.tokens=1000", "rollout.max_prompt_tokens=99").budget.tokens == 1000


# ---- sweeps


def test_points_are_every_combination_in_order():
    points = expand_points(["group_size=4,8", "seed=range(0,2)", "steps=3"])
    assert [point.swept for point in points] == [
        ("group_size=4", "seed=0"), ("group_size=4", "seed=1"), ("group_size=8", "seed=0"), ("group_size=8", "seed=1"),
    ]  # fmt: skip
    assert points[0].overrides == ("group_size=4", "seed=0", "steps=3")


def test_a_glob_takes_choices_and_an_empty_one_is_refused():
    every = [(f"adapter={name}",) for name in ("dora", "full", "lora")]
    assert [point.swept for point in expand_points(["adapter=glob(*)"])] == every
    with pytest.raises(ConfigError, match=r"adapter: glob\(zz\*\) matches nothing; choices: dora, full, lora"):
        expand_points(["adapter=glob(zz*)"])


def test_a_point_listed_twice_and_a_continuous_sweep_are_refused():
    with pytest.raises(ConfigError, match="seed=1 is listed twice"):
        expand_points(["seed=1,2,1"])
    with pytest.raises(ConfigError, match="INTERVAL_SWEEP"):
        expand_points(["seed=interval(0,1)"])


ENVIRONMENT_PART = {"name": "environment", "weight": 1.0}
TRUNCATED_PART = {"name": "truncated", "weight": 0.1}


@pytest.mark.parametrize("label", ["mean", "std", "success", "reward", "a b"])
def test_a_part_of_the_reward_cannot_be_logged_over_a_number_of_the_whole(label):
    # reward/mean of a part would stand where the mean reward stands
    with pytest.raises(ConfigError, match=rf"reward\.{label}: a part cannot be called"):
        validate({**compose_config([]), "reward": {"environment": ENVIRONMENT_PART, label: TRUNCATED_PART}})


def test_a_part_may_be_called_reward_where_it_is_the_whole():
    assert list(validate({**compose_config([]), "reward": {"reward": ENVIRONMENT_PART}}).reward) == ["reward"]


def test_a_reward_that_pays_nothing_trains_nothing_and_is_still_evaluated():
    nothing = ["env=arithmetic", "reward=numeric", "reward.numeric.weight=0"]
    with pytest.raises(ConfigError, match=r"reward\.numeric\.weight: got 0, .* Try reward\.numeric\.weight=1\."):
        validate(compose_config(nothing))
    assert validate(compose_config([*nothing, "job=evaluate"])).reward["numeric"].weight == 0


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("reward=[]", r"^reward: got nothing; at least one part is needed. Try reward=environment\.$"),
        ("+reward.x={}", r"reward\.x\.name: got null; choices: environment, "),
        ("reward=[numeric,numeric]", r"^reward: numeric is listed twice\. Give each name once"),
    ],
)
def test_a_reward_of_no_parts_of_a_nameless_or_of_a_repeated_one_is_refused_by_name(override, complaint):
    with pytest.raises(ConfigError, match=complaint):
        validate(compose_config([override, "env=arithmetic"]))


def test_no_experiment_is_a_choice_too_so_that_a_sweep_can_compare_with_it():
    assert compose_config(["experiment=none"]) == compose_config([])
    points = expand_points(["experiment=none,grpo_smollm2_arithmetic"])
    assert [point.swept for point in points] == [("experiment=none",), ("experiment=grpo_smollm2_arithmetic",)]
    with pytest.raises(ConfigError, match="Did you mean experiment=none"):
        compose_config(["experiment=null"])


def test_a_bias_is_given_by_the_id_of_a_token_from_the_command_line_and_through_json():
    config = load("rollout.token_bias={13:-5, word: 2}")
    assert config.rollout.token_bias == {13: -5.0, "word": 2.0}
    assert validate(json.loads(json.dumps(config.plain()))).rollout.token_bias == config.rollout.token_bias
    swept = expand_points(["rollout.token_bias={13:-5},{13:0}"])
    assert [load(*point.overrides).rollout.token_bias for point in swept] == [{13: -5.0}, {13: 0.0}]


@pytest.mark.parametrize("value", ["5", "{13:much}", "{13:inf}"])
def test_a_bias_that_is_no_table_of_numbers_is_told_what_one_looks_like(value):
    problem = only_problem(f"rollout.token_bias={value}")
    assert (
        "rollout.token_bias: got" in problem
        and "each KEY a whole number or text, each VALUE a finite number" in problem
    )
