import numpy as np
import pytest

from fadex.core import checks


@pytest.mark.smoke
def test_messages_name_argument_value_and_expectation():
    with pytest.raises(ValueError, match=r"interval: must be >= 1, got 0"):
        checks.check_int("interval", 0, minimum=1)
    with pytest.raises(TypeError, match=r"interval: expected an integer, got 1\.5"):
        checks.check_int("interval", 1.5)
    with pytest.raises(TypeError, match=r"flag: expected an integer, got True"):
        checks.check_int("flag", True)
    with pytest.raises(ValueError, match=r"alpha: must lie in \(0, 2\), got 2\.0"):
        checks.check_real("alpha", 2.0, minimum=0, maximum=2, exclusive=True)
    with pytest.raises(ValueError, match=r"lam: must be finite, got nan"):
        checks.check_real("lam", float("nan"))
    with pytest.raises(ValueError, match=r"site: expected one of 'a', 'b', got 'c'"):
        checks.check_choice("site", "c", ("a", "b"))
    with pytest.raises(ValueError, match=r"w: expected shape \(2, \*\), got \(3, 4\)"):
        checks.check_shape("w", np.zeros((3, 4)), (2, None))
    with pytest.raises(ValueError, match=r"cond\['y'\]: expected a leading axis of length 3"):
        checks.check_leading_axis("cond", {"y": np.zeros(2)}, 3)
    with pytest.raises(ValueError, match=r"w: holds values that are not finite"):
        checks.check_finite("w", np.array([1.0, np.inf]))


def test_good_values_come_back_as_plain_numbers():
    assert type(checks.check_int("n", np.int32(3))) is int
    assert type(checks.check_real("x", np.float32(3))) is float
