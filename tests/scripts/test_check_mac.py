"""The check of a machine: it measures everything it names, and notices what is broken."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import check_mac
from mlxrl_runs.check import equivalence
from mlxrl_runs.policy.shared_prompt import _PromptCache
from mlxrl_runs.rollout.blocks import DenseBlocks
from mlxrl_runs.training.score import score


@pytest.mark.slow
def test_everything_is_measured_and_passes(tmp_path, capsys):
    file = tmp_path / "deeper/check.json"
    assert check_mac.main(["--small", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["passed"] and set(result["gates"]) == set(check_mac.GATES)
    assert all(found["difference"] <= found["tolerance"] and found["passed"] for found in result["gates"].values())
    figures = list(result["benchmarks"].values())
    assert figures[0]["batched_tokens_per_second"] > 0 and figures[1]["update_peak_bytes"] > 45_000_000  # 11M float32
    assert figures[2]["first_step_seconds"] > figures[2]["help_seconds"]
    assert result["machine"]["mlx"]["backend"] == result["backend"]
    assert sys.prefix not in file.read_text()  # a path may hold a person's name
    out = capsys.readouterr().out
    assert "all gates pass" in out and "fused export = live" in out and f"written to {file}" in out


def broken_adapter(monkeypatch):
    save = check_mac.Policy.save

    def forgets(policy, folder):
        policy.model.layers[0].mlp.up_proj.lora_b *= 0
        save(policy, folder)
        policy.model.layers[0].mlp.up_proj.lora_b += 0.02

    monkeypatch.setattr(check_mac.Policy, "save", forgets)


def broken_fuse(monkeypatch):
    write = check_mac.export.write_fused

    def forgets(policy, folder, *, dequantize):
        policy.model.layers[1].self_attn.q_proj.scale = 0.0
        write(policy, folder, dequantize=dequantize)

    monkeypatch.setattr(check_mac.export, "write_fused", forgets)


def broken_off_switch(monkeypatch):
    monkeypatch.setattr(check_mac.check, "adapters_off", lambda model: nullcontext())


def broken_micro_batches(monkeypatch):
    chunks = check_mac.Batch.chunks
    monkeypatch.setattr(check_mac.Batch, "chunks", lambda batch, rows: list(chunks(batch, rows))[: 1 if rows else None])


def broken_batching(monkeypatch):
    compare = equivalence.compare

    def parts_by_chance(one, other, margins):
        return replace(compare(one, other, margins), margins=(0.5,))

    monkeypatch.setattr(equivalence, "compare", parts_by_chance)


def broken_compiling(monkeypatch):
    logits = DenseBlocks.logits
    monkeypatch.setattr(DenseBlocks, "logits", lambda blocks, x, weights: 1.1 * logits(blocks, x, weights))


def broken_temperature(monkeypatch):
    monkeypatch.setattr(check_mac.check, "score", lambda *args, **kwargs: score(args[0], args[1], 1.1, **kwargs))


def broken_checkpointing(monkeypatch):
    def loses_the_gradient(cache, arrays):
        cache.keys, cache.values = map(mx.stop_gradient, arrays)

    monkeypatch.setattr(_PromptCache, "leave", loses_the_gradient)


BROKEN = {
    "batched = one by one": broken_batching,
    "compiled = plain": broken_compiling,
    "sampled log-probability = training pass": broken_temperature,
    "adapters off = base": broken_off_switch,
    "saved adapter = live": broken_adapter,
    "checkpointed = plain gradient": broken_checkpointing,
    "micro-batches = whole": broken_micro_batches,
    "fused export = live": broken_fuse,
}


@pytest.mark.parametrize("name", check_mac.GATES)
def test_each_gate_notices_what_it_is_for(name, monkeypatch):
    assert check_mac.GATES[name](50)["passed"]
    BROKEN[name](monkeypatch)
    found = check_mac.GATES[name](50)
    assert not found["passed"] and found["difference"] > 10 * found["tolerance"]


def test_a_gate_that_fails_or_raises_is_exit_1_and_the_rest_still_runs(tmp_path, monkeypatch, capsys):
    def raises(tokens):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(
        check_mac, "GATES", {"bad": lambda tokens: check_mac.check.Finding(2.0, 1.0, "").as_json(), "raises": raises}
    )
    monkeypatch.setattr(check_mac, "BENCHMARKS", {"speed": lambda size: {"tokens_per_second": 1234.5}})
    file = tmp_path / "check.json"
    assert check_mac.main(["--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert not result["passed"] and result["gates"]["raises"]["error"] == "RuntimeError: no such kernel"
    assert result["benchmarks"]["speed"]["tokens_per_second"] == 1234.5
    out = capsys.readouterr().out
    assert "FAILED RuntimeError: no such kernel" in out and "A GATE FAILED" in out and "1,234.50" in out
