import io
import sys

import pytest

from fadex.core import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_everything_is_silent_away_from_a_terminal(capsys):
    with progress.progress_bar(3, "train") as advance:
        advance()
        advance(2)
    assert list(progress.track(range(4), "quantize")) == [0, 1, 2, 3]
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_request_goes_to_stderr_only(capsys):
    pytest.importorskip("rich")
    with progress.progress_bar(2, "train", enabled=True) as advance:
        print("result")
        advance(2)
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert "train" in err and "100%" in err


def test_a_terminal_gets_a_bar_unless_it_is_switched_off(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    for enabled, shown in ((None, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(progress.track([1, 2], "profile", enabled=enabled)) == [1, 2]
        assert ("profile" in terminal.getvalue()) == shown


def test_without_rich_the_work_goes_on_silently(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(progress.track(iter("ab"), enabled=True)) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_an_iterable_without_length_and_an_early_exit_work(capsys):
    pytest.importorskip("rich")
    for item in progress.track(iter(range(100)), "search", enabled=True):
        if item == 3:
            break
    assert item == 3
    assert capsys.readouterr().out == ""
    with pytest.raises(KeyError), progress.progress_bar(5, enabled=True) as advance:
        advance()
        raise KeyError("from the body")
