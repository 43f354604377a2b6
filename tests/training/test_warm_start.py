"""The supervised start: what its examples are, and that it teaches them."""

import mlx.core as mx
import pytest

from building import engine_of, settings, tiny, updater_of
from mlxrl_runs.core.batch import collate
from mlxrl_runs.core.protocols import StepResult
from mlxrl_runs.core.trajectory import Group
from mlxrl_runs.envs.python import PythonFile
from mlxrl_runs.errors import ConfigError
from mlxrl_runs.policy.forward import token_outputs
from mlxrl_runs.rollout.sampling import Sampling
from mlxrl_runs.training.evaluate import Evaluator
from mlxrl_runs.training.warm_start import WarmStarter


def starter(policy, family, actions="oracle", steps=1, learning_rate=3e-3, seed=0):
    chat = engine_of(policy).chat
    return WarmStarter(family, chat, updater_of(policy, learning_rate), steps, 16, actions, seed)


def test_an_example_is_what_the_engine_would_have_written_down():
    policy, family = tiny(), settings("env", "recurring")
    [example, *_] = starter(policy, family)._episodes(1)
    assert [turn.reward for turn in example.turns] == [0.25, 0.25, 0.25, 1.0] and example.success
    eos = policy.tokenizer.eos_token_id
    assert all(turn.action[-1] == eos for turn in example.turns)
    read = policy.tokenizer.decode(example.tokens)
    door = example.task.split("-")
    assert all(f"door {colour}" in read for colour in door)
    # turn by turn, tokens go on exactly as in a conversation that the chat format renders
    assert example.turns[0].context == engine_of(policy).chat.first(f"door {door[0]}").tokens


def test_examples_are_of_training_tasks_and_random_ones_are_well_formed_but_know_nothing():
    family = settings("env", "arithmetic")
    episodes = [episode for step in range(1, 9) for episode in starter(tiny(), family, "random")._episodes(step)]
    assert not {episode.task for episode in episodes} & set(family.held_out_tasks())
    assert all(turn.reward_parts["format"] == 0.1 for episode in episodes for turn in episode.turns)
    assert sum(episode.success for episode in episodes) < 10  # of 128; an integer in -38..38 is right once in 77


def test_the_cross_entropy_is_the_mean_over_the_actions_tokens():
    policy, family = tiny(), settings("env", "arithmetic")
    warm = starter(policy, family)
    batch = collate([Group(episode.task, (episode,)) for episode in warm._episodes(1)])
    logp = token_outputs(policy.model, batch, 1.0).logp
    by_hand = -logp.sum().item() / batch.action_mask.sum().item()
    assert warm.train() == [pytest.approx(by_hand, rel=1e-5)]


def test_it_teaches_the_form_and_repeats_itself():
    def scores_and_losses():
        policy, family = tiny(), settings("env", "recurring")
        evaluator = Evaluator(engine_of(policy), family, Sampling(), seed=0, episodes=64, rows=80)
        before = evaluator.evaluate()
        losses = starter(policy, family, "random", steps=12).train()
        return before, evaluator.evaluate(), losses

    before, after, losses = scores_and_losses()
    assert losses[-1] < losses[0]
    assert after["sampled"]["parts"]["malformed"] > before["sampled"]["parts"]["malformed"]
    assert scores_and_losses()[2] == losses


def test_an_environment_that_cannot_show_how_is_refused():
    class Mute:
        max_turns = 1

        def reset(self):
            return "say"

        def step(self, action):
            return StepResult("", 0.0, True)

        def state_id(self, observation):
            return ""

    recommended = settings("env", "recurring").recommended.model_dump()
    family = PythonFile.of(lambda task, seed, member: Mute(), "<test>", "Mute", 10, 2, recommended)
    with pytest.raises(ConfigError, match=r"trainer\.warm_start\.steps=1: the environment shows no examples"):
        starter(tiny(), family).train()


def test_prefixed_examples_go_on_behind_the_prefix():
    family = settings("env", "recurring", answer_prefix="<action>")
    [example, *_] = starter(tiny(), family)._episodes(1)
    assert example.turns[0].text.endswith("</action>") and not example.turns[0].text.startswith("<action>")
    assert example.success
    assert mx.array(example.turns[0].context).size > 0
