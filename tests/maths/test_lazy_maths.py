import subprocess
import sys

import pytest

from mlxrl_runs import maths


def test_naming_the_package_loads_no_mlx_and_using_it_does():
    script = (
        "import sys; from mlxrl_runs import maths; assert 'mlx.core' not in sys.modules;"
        "maths.surrogates.clipped_surrogate; assert 'mlx.core' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_submodule_is_reached_by_its_name():
    assert [getattr(maths, name).__name__ for name in maths.__all__] == [f"{maths.__name__}.{n}" for n in maths.__all__]


def test_a_wrong_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'surrogate'"):
        maths.surrogate  # noqa: B018
