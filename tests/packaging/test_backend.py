import ctypes
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from mlxrl_runs import backend
from mlxrl_runs.errors import MlxrlError


def pretend(monkeypatch, *installed, platform="linux"):
    """A machine on which only these distributions are installed."""

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(backend, "version", version)


def test_without_a_backend_the_message_names_every_extra_that_brings_one(monkeypatch):
    pretend(monkeypatch, "mlx-lm", "mlxrl-runs")
    with pytest.raises(MlxrlError) as refused:
        backend.prepare()
    assert "mlxrl-runs[cpu]" in str(refused.value)
    assert "[cuda12]" in str(refused.value) and "[cuda13]" in str(refused.value)


def test_a_cuda_backend_needs_no_blas_and_a_mac_needs_nothing(monkeypatch):
    monkeypatch.setattr(backend, "_load_blas", lambda: pytest.fail("no BLAS is wanted here"))
    pretend(monkeypatch, "mlx-cuda-13")
    assert backend.prepare() == backend.Backend("cuda")
    pretend(monkeypatch, platform="darwin")
    assert backend.prepare() == backend.Backend("metal")


def test_a_cpu_without_a_fast_blas_is_told_both_remedies(monkeypatch):
    pretend(monkeypatch, "mlx-cpu")
    monkeypatch.setattr(backend, "_blas_candidates", lambda: [])
    found = backend.prepare()
    assert (found.name, found.blas) == ("cpu", None)
    assert "libopenblas0-pthread" in found.warning and "mlxrl-runs[blas]" in found.warning


def test_a_library_that_does_not_load_or_lacks_the_symbol_is_passed_over(monkeypatch):
    def load(name, mode):
        if name == "broken.so":
            raise OSError("invalid ELF header")
        return SimpleNamespace(**{{"prefixed.so": "scipy_cblas_sgemm", "good.so": "cblas_sgemm"}[name]: None})

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(backend, "_blas_candidates", lambda: ["broken.so", "prefixed.so", "good.so"])
    assert backend._load_blas() == "good.so"


def test_mkl_is_found_by_its_installed_files(monkeypatch, tmp_path):
    # the layout pip makes: metadata in lib/python3.x/site-packages, the libraries three folders up in lib
    info = tmp_path / "lib/python3.x/site-packages/mkl-2026.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mkl\nVersion: 2026.2\n")
    (info / "RECORD").write_text("../../libmkl_core.so.3,,\n../../libmkl_rt.so.3,,\n")
    for name in ("libmkl_core.so.3", "libmkl_rt.so.3"):
        (tmp_path / "lib" / name).touch()
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sys, "path", [str(info.parent)])
    assert list(backend._blas_candidates()) == [str(tmp_path / "lib/libmkl_rt.so.3")]
