"""Is each defect of MLX and mlx-lm that we work around still there? docs/upstream.md says what we do about each.

    python scripts/upstream.py [--only NAME,...] [--json FILE]

Every function below is a reproduction: it returns what it saw and whether that is the defect. Some need a backend that
this machine may not have; those are named, not claimed.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrl_runs import backend

BACKEND = backend.prepare()

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import gemma2
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from transformers import AutoTokenizer

from benching import surroundings
from mlxrl_runs.policy.shapes import SHAPES
from mlxrl_runs.policy.source import TINY

ANY, LINUX_CPU, X86_CPU, CUDA = "any", "a Linux CPU", "an x86 CPU", "an NVIDIA GPU"
Seen = tuple[bool, str]  # whether the defect is there, and what was seen


# ---- MLX


def reference_blas() -> Seen:
    """MLX's Linux wheel multiplies matrices with a reference BLAS."""
    found = float(_fresh("from mlxrl_runs.backend import gigaflops; print(gigaflops(1024))"))
    return (
        found < backend.SLOW_GIGAFLOPS,
        f"{found:.1f} GFLOP/s in a 1024 product, {backend.gigaflops(1024):.0f} with {_blas()}",
    )


def slow_quantised_matmul_on_cpu() -> Seen:
    """A product with 4-bit weights takes far longer than one with float weights."""
    left, right = mx.random.normal((128, 1024)), mx.random.normal((1024, 1024))
    packed = mx.quantize(right, 64, 4)
    slow = _seconds(lambda: mx.quantized_matmul(left, *packed, group_size=64, bits=4))
    fast = _seconds(lambda: left @ right)
    rate = 2 * 128 * 1024**2 / slow / 1e9
    return slow > 3 * fast, f"{rate:.1f} GFLOP/s, {slow / fast:.0f} times as long as float32"


def slow_exp_on_x86() -> Seen:
    """exp goes one number at a time, without vector instructions."""
    values = mx.random.normal((1 << 20,))
    exponential, product = (_seconds(way) / values.size * 1e9 for way in (lambda: mx.exp(values), lambda: values * 1.5))
    return exponential > 10 * product, f"{exponential:.1f} ns a number, {product:.2f} ns for a product"


def kernels_need_a_compiler() -> Seen:
    """Where no g++ is found, compiled functions run unfused on a CPU, and nothing says so."""
    code = "import mlx.core as mx; f = mx.compile(lambda x: mx.sin(x) * 2 + mx.cos(x)); mx.eval(f(mx.ones(8)))"
    made = []
    for path in (os.environ["PATH"], os.devnull):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            said = _fresh(code, TMPDIR=folder, PATH=path, said_too=True)
            made.append((len(list(Path(folder).rglob("*.so"))), time.perf_counter() - started, said))
    (kernels, seconds, _), (without, _, said) = made
    return (
        kernels > without and not said.strip(),
        f"{kernels} kernel in {seconds:.1f} s with g++; {without} without, and it says {said.strip()!r}",
    )


def shapeless_compile_of_random() -> Seen:
    """A compiled function that draws random bits cannot be shapeless."""
    draw = mx.compile(lambda like, key: like + mx.random.uniform(shape=like.shape, key=key), shapeless=True)
    return _raises(lambda: [draw(mx.ones(size), mx.random.key(0)) for size in (3, 4)])


def random_state_cannot_be_assigned() -> Seen:
    """Assigning mx.random.state neither restores the draws nor fails."""
    with _module_attribute(mx.random, "state"):
        saved = [mx.array(part) for part in mx.random.state]
        mx.eval(saved)
        first = mx.random.uniform(shape=(3,)).tolist()
        mx.random.state = saved
        again = mx.random.uniform(shape=(3,)).tolist()
    return first != again, f"drew {first[0]:.3f}, then {again[0]:.3f} from the saved state"


def new_threads_draw_the_same() -> Seen:
    """Every new thread draws the same numbers, whatever the seed."""
    drawn: list[float] = []
    for seed in (1, 2):
        mx.random.seed(seed)
        thread = threading.Thread(target=lambda: drawn.append(mx.random.uniform().item()))
        thread.start()
        thread.join()
    return drawn[0] == drawn[1], f"seeds 1 and 2 draw {drawn[0]:.4f} and {drawn[1]:.4f} in a new thread"


def compiled_function_keeps_old_weights() -> Seen:
    """A compiled function keeps the weights it was traced with, unless they are declared as inputs."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = mx.array([[1.0]])
    call = mx.compile(lambda x: layer(x))
    before = call(mx.array([[1.0]])).item()
    layer.weight = mx.array([[2.0]])
    after = call(mx.array([[1.0]])).item()
    return before == after, f"weight 1 gives {before:g}, then weight 2 gives {after:g}"


def compiled_function_repeats_its_draws() -> Seen:
    """A compiled function draws the same numbers each time, unless the random state is declared."""
    draw = mx.compile(lambda x: x + mx.random.uniform())
    first, second = draw(mx.array(0.0)).item(), draw(mx.array(0.0)).item()
    return first == second, f"drew {first:.4f} and {second:.4f}"


def failed_trace_spoils_the_module() -> Seen:
    """After an exception within a compiled function, a module whose state was declared cannot be evaluated any more."""
    layer = nn.Linear(1, 1)

    def fails(x: mx.array) -> mx.array:
        layer(x)
        raise KeyError("ours")

    with contextlib.suppress(KeyError):
        mx.compile(fails, inputs=layer.state, outputs=layer.state)(mx.ones((1, 1)))
    return _raises(lambda: layer.weight + 0)


def checkpoint_ignores_captured_weights() -> Seen:
    """mx.checkpoint of a function that captures weights gives them a gradient of 0."""
    layer = nn.Linear(1, 1, bias=False)
    loss = lambda model, x: mx.checkpoint(lambda y: model(y))(x).sum()
    _, gradient = nn.value_and_grad(layer, loss)(layer, mx.array([[3.0]]))
    found = gradient["weight"].item()
    return found == 0, f"gradient {found:g}, which is 3"


def checkpoint_refuses_integers() -> Seen:
    """mx.checkpoint of a function with an integer argument fails in the backward pass."""
    picked = lambda weights, places: weights[places].sum()
    mx.eval(mx.grad(picked)(mx.ones(3), mx.array([0, 1])))  # works without
    return _raises(lambda: mx.grad(mx.checkpoint(picked))(mx.ones(3), mx.array([0, 1])))


# ---- mlx-lm


def import_lowers_open_files() -> Seen:
    """Importing mlx_lm sets the limit of open files of the whole process."""
    set_it = "import resource as r; hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (1000, hard))"
    after = _fresh(f"{set_it}; import mlx_lm; print(r.getrlimit(r.RLIMIT_NOFILE))").strip()
    return not after.startswith("(1000,"), f"set to 1000 before, {after} after"


def tuner_imports_wandb() -> Seen:
    """Importing mlx_lm.tuner imports wandb where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "wandb.py").write_text("")
        code = f"import sys; sys.path.insert(0, {folder!r}); import mlx_lm.tuner.utils; print('wandb' in sys.modules)"
        found = _fresh(code).strip()
    return found == "True", f"wandb imported: {found}"


def plain_cache_with_left_padding() -> Seen:
    """The default cache takes left-padded prompts and gives wrong logits."""
    model, short, long = _model(), [5, 6, 7], [1, 2, 3, 4, 5, 6]
    padded = model(mx.array([[0, 0, 0, *short], long]), cache=make_prompt_cache(model))[0, -1]
    return _apart(padded, model(mx.array([short]))[0, -1])


def plain_cache_with_right_padding() -> Seen:
    """The default cache takes right-padded prompts, and what is decoded after them is wrong."""
    model, short, long = _model(), [5, 6, 7], [1, 2, 3, 4, 5, 6]
    cache = make_prompt_cache(model)
    model(mx.array([[*short, 0, 0, 0], long]), cache=cache)
    return _apart(model(mx.array([[8], [8]]), cache=cache)[0, -1], model(mx.array([[*short, 8]]))[0, -1])


def load_adapters_leaves_the_base_trainable() -> Seen:
    """A model with adapters loaded would train its base too."""
    adapted, parameters = _model(), {"rank": 4, "scale": 1.0, "dropout": 0.0}
    adapted.freeze()
    linear_to_lora_layers(adapted, 1, parameters)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    with tempfile.TemporaryDirectory() as folder:
        weights = dict(tree_flatten(adapted.trainable_parameters()))
        mx.save_safetensors(f"{folder}/adapters.safetensors", weights)
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        loaded = load_adapters(_model(), folder)
        names = [name for name, _ in tree_flatten(loaded.trainable_parameters()) if "lora" not in name]
    return bool(names), f"{len(names)} weights of the base are trainable"


def grad_checkpoint_patches_the_class() -> Seen:
    """Checkpointing one model checkpoints every later one of its kind."""
    model, other = _model(), _model()
    block = type(other.layers[0])
    with _module_attribute(block, "__call__"):
        before = block.__call__
        grad_checkpoint(model.layers[0])
        changed = type(other.layers[0]).__call__ is not before
    return changed, f"another model's layer is changed: {changed}"


def gemma2_takes_rows_for_heads() -> Seen:
    """mlx-lm's gemma2 with grouped heads reads a mask of rows as one of heads: wrong with as many rows as groups."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "vocab_size": 32}
    mx.random.seed(0)
    model = gemma2.Model(gemma2.ModelArgs.from_dict({"model_type": "gemma2"} | sizes | more))
    prompts, cache = mx.array([[0, 0, 0, 5, 6, 7], [1, 2, 3, 4, 5, 6]]), [BatchKVCache([3, 0])]
    return _apart(model(prompts, cache=cache)[0, -1], model(prompts[:1, 3:])[0, -1])


def eos_argument_only_adds() -> Seen:
    """TokenizerWrapper's eos_token_ids adds to the tokenizer's own end mark and cannot replace it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    found = TokenizerWrapper(tokenizer, eos_token_ids=[-1]).eos_token_ids
    return found != {-1}, f"asked for {{-1}}, got {found}"


def dora_on_odd_bits() -> Seen:
    """DoRA on weights of 3, 5 or 6 bits has a wrong width."""
    model = _model()
    nn.quantize(model, group_size=32, bits=6)
    linear_to_lora_layers(model, 1, {"rank": 4, "scale": 1.0, "dropout": 0.0}, use_dora=True)
    return _raises(lambda: model(mx.array([[1, 2]])))


# ---- MLX on an NVIDIA GPU


def masked_decode_attention() -> Seen:
    """Attention of one token a row has no fused kernel once there is an array mask."""
    shape = lambda heads, length: mx.random.normal((64, heads, length, 128)).astype(mx.bfloat16)
    query, keys, values, mask = shape(16, 1), shape(8, 384), shape(8, 384), mx.ones((64, 1, 1, 384), dtype=mx.bool_)
    attend = lambda given: mx.fast.scaled_dot_product_attention(query, keys, values, scale=0.1, mask=given)
    masked, plain = _seconds(lambda: attend(mask)), _seconds(lambda: attend(None))
    return masked > 1.5 * plain, f"{masked / plain:.1f} times as long with a mask"


def fused_attention_is_not_repeatable() -> Seen:
    """Attention of one token a row differs from call to call on equal inputs."""
    shape = lambda heads, length: mx.random.normal((4, heads, length, 128)).astype(mx.bfloat16)
    query, keys, values = shape(16, 1), shape(8, 4096), shape(8, 4096)
    attend = lambda: mx.fast.scaled_dot_product_attention(query, keys, values, scale=0.1)
    first = attend()
    parted = sum(not mx.array_equal(first, attend()).item() for _ in range(50))
    return parted > 0, f"{parted} of 50 repeats differ"


def slow_quantised_matmul_on_cuda() -> Seen:
    """At training sizes a product with 4-bit weights takes longer than one with bfloat16 weights."""
    left, right = (mx.random.normal(shape).astype(mx.bfloat16) for shape in ((4096, 1024), (3072, 1024)))
    packed = mx.quantize(right, 64, 4)
    slow = _seconds(lambda: mx.quantized_matmul(left, *packed, group_size=64, bits=4))
    fast = _seconds(lambda: left @ right.T)
    return slow > 1.5 * fast, f"{slow / fast:.1f} times as long"


def no_linear_algebra_on_cuda() -> Seen:
    """Factorisations run on the CPU alone."""
    return _raises(lambda: mx.linalg.qr(mx.eye(4), stream=mx.gpu))


def kernels_are_compiled_at_first_use() -> Seen:
    """The first use of a kernel compiles it, for seconds, unless MLX_PTX_CACHE_DIR keeps it."""
    code = "import time; import mlx.core as mx; x = mx.ones((8, 8)); mx.eval(x); started = time.perf_counter()\n"
    code += "mx.eval(x[mx.array([1, 2])]); print(time.perf_counter() - started)"
    with tempfile.TemporaryDirectory() as folder:
        first, second = (float(_fresh(code, MLX_PTX_CACHE_DIR=folder)) for _ in range(2))
    return first > second + 1, f"{first:.1f} s, then {second:.1f} s from the cache"


def cuda_graphs_slow_down_small_work() -> Seen:
    """A loop of many small operations is faster without CUDA graphs."""
    code = "import time, mlx.core as mx; x = mx.ones((8, 8)); mx.eval(x)\n"
    code += "for _ in range(3):\n  started = time.perf_counter()\n  for _ in range(50):\n"
    code += "    for _ in range(100): x = x * 1.01 + 0.1\n    mx.eval(x)\nprint(time.perf_counter() - started)"
    with_graphs, without = float(_fresh(code)), float(_fresh(code, MLX_USE_CUDA_GRAPHS="0"))
    return with_graphs > 1.05 * without, f"{with_graphs / without:.2f} times as long with them"


# ---- looking


@dataclass(frozen=True)
class Defect:
    """A reproduction and where it can be run."""

    look: Callable[[], Seen]
    needs: str = ANY

    @property
    def name(self) -> str:
        return self.look.__name__


DEFECTS = (
    Defect(reference_blas, LINUX_CPU),
    Defect(slow_quantised_matmul_on_cpu, LINUX_CPU),
    Defect(slow_exp_on_x86, X86_CPU),
    Defect(kernels_need_a_compiler, LINUX_CPU),
    Defect(shapeless_compile_of_random),
    Defect(random_state_cannot_be_assigned),
    Defect(new_threads_draw_the_same),
    Defect(compiled_function_keeps_old_weights),
    Defect(compiled_function_repeats_its_draws),
    Defect(failed_trace_spoils_the_module),
    Defect(checkpoint_ignores_captured_weights),
    Defect(checkpoint_refuses_integers),
    Defect(import_lowers_open_files),
    Defect(tuner_imports_wandb),
    Defect(plain_cache_with_left_padding),
    Defect(plain_cache_with_right_padding),
    Defect(load_adapters_leaves_the_base_trainable),
    Defect(grad_checkpoint_patches_the_class),
    Defect(gemma2_takes_rows_for_heads),
    Defect(eos_argument_only_adds),
    Defect(dora_on_odd_bits),
    Defect(masked_decode_attention, CUDA),
    Defect(fused_attention_is_not_repeatable, CUDA),
    Defect(slow_quantised_matmul_on_cuda, CUDA),
    Defect(no_linear_algebra_on_cuda, CUDA),
    Defect(kernels_are_compiled_at_first_use, CUDA),
    Defect(cuda_graphs_slow_down_small_work, CUDA),
)


def examined(defect: Defect) -> dict[str, str]:
    """What the reproduction shows here: still there, gone, not looked at, or that it could not be run."""
    if not is_met(defect.needs):
        return {"name": defect.name, "state": "not looked at", "seen": f"needs {defect.needs}"}
    try:
        still, seen = defect.look()
    except Exception as error:
        return {"name": defect.name, "state": "unknown", "seen": _first_line(error)}
    return {"name": defect.name, "state": "still there" if still else "gone", "seen": seen}


def is_met(needs: str) -> bool:
    on_cpu = BACKEND.name == "cpu"
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {ANY: True, LINUX_CPU: on_cpu, X86_CPU: on_cpu and x86, CUDA: BACKEND.name == "cuda"}[needs]


# ---- what reproductions are made of


def _fresh(code: str, said_too: bool = False, **environment: str) -> str:
    """What a fresh process prints; with `said_too`, what it writes to its error stream as well.

    Raises: RuntimeError when it fails.
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout + (done.stderr if said_too else "")


def _seconds(make: Callable[[], mx.array]) -> float:
    """Best of three, after one that warms up."""
    mx.eval(make())
    found = []
    for _ in range(3):
        started = time.perf_counter()
        mx.eval(make())
        found.append(time.perf_counter() - started)
    return min(found)


def _raises(make: Callable[[], Any]) -> Seen:
    try:
        mx.eval(make())
    except (ValueError, RuntimeError) as error:
        return True, _first_line(error)
    return False, "it works"


def _apart(found: mx.array, right: mx.array) -> Seen:
    difference = mx.abs(found - right).max().item()
    return difference > 1e-2, f"logits off by {difference:.2g}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextlib.contextmanager
def _module_attribute(owner: Any, name: str) -> Any:
    """Inside, the attribute may be replaced; afterwards it is as before."""
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _model() -> nn.Module:
    """A small dense decoder with random weights, large enough in scale for a wrong position to show."""
    model = Model(ModelArgs.from_dict(SHAPES["1m"]))
    mx.eval(model.parameters())
    mx.random.seed(0)
    model.load_weights([("model.embed_tokens.weight", mx.random.normal((2048, 128)))], strict=False)
    return model


def _blas() -> str:
    return Path(BACKEND.blas).name if BACKEND.blas else "no other"


def table(found: Sequence[dict[str, str]]) -> str:
    lines = ["| defect | here | seen |", "|---|---|---|"]
    return "\n".join(lines + [f"| {entry['name']} | {entry['state']} | {entry['seen']} |" for entry in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [defect.name for defect in DEFECTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = surroundings(BACKEND)
    print(json.dumps(report["versions"] | {"backend": report["backend"], "device": report["device"]}))
    report["defects"] = [examined(defect) for defect in DEFECTS if defect.name in arguments.only]
    print("\n" + table(report["defects"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
