"""The product's maths against other projects' answers: data/README.md says what they are and how close is close.

`GOLDEN_DIR=<folder> pytest tests/golden` reads another folder of the same kinds.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from golden_adapters import ADAPTERS
from golden_cases import FOLDER, INFORMATIVE, STILL_TO_COME, Case, assert_close, files, target_cases


def _parameters() -> Iterator[Any]:
    for path in files():
        for case in target_cases(path):
            later = [pytest.mark.skip(reason="still to come")] if case.file in STILL_TO_COME else []
            yield pytest.param(case, id=f"{case.file}::{case.name}", marks=later)


@pytest.mark.parametrize("case", list(_parameters()))
def test_our_numbers_are_the_reference_numbers(case: Case):
    assert case.file in ADAPTERS, f"{case.file}.json is a file nobody here knows"
    answer = ADAPTERS[case.file](case)
    unanswered = case.expected.keys() - answer.keys() - INFORMATIVE
    assert not unanswered, f"nothing of ours answers {sorted(unanswered)}"
    for field in case.expected.keys() & answer.keys():
        assert_close(case, field, answer[field])


def test_the_folder_holds_cases_to_check():
    assert any(path.stem in ADAPTERS for path in files()), f"no known file in {FOLDER}"


def test_no_file_is_both_checked_and_still_to_come():
    assert not ADAPTERS.keys() & STILL_TO_COME
