"""The socket is its user's alone; one that was left behind is replaced, one that lives is not."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compiled_llm.server.engine_process import socket_file
from compiled_llm.server.engine_process.socket_file import listen, remove


def left_behind(path: Path) -> None:
    """Make a socket in a process that is killed."""
    code = f"import os, signal, socket; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen(); "
    subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGKILL)"], check=False)
    assert path.is_socket()


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(str(path)) == 0


def test_only_its_user_may_open_it(folder: Path) -> None:
    path = folder / "new" / "deeper" / "socket"
    with listen(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert connects(path)


def test_one_that_was_left_behind_is_replaced(path: Path) -> None:
    left_behind(path)
    with listen(path):
        assert connects(path)


def test_a_live_one_is_refused_and_lives_on(path: Path) -> None:
    with listen(path) as first:
        with pytest.raises(
            RuntimeError, match="an engine process listens there already; stop it, or give another path"
        ):
            listen(path)
        assert connects(path)
        first.close()
        with listen(path):
            assert connects(path)


def test_one_that_is_too_busy_to_answer_is_refused(path: Path) -> None:
    with listen(path) as first:
        first.listen(0)
        peers = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for peer in peers:
            peer.setblocking(False)
            peer.connect_ex(str(path))
        with pytest.raises(RuntimeError, match="listens there already"):
            listen(path)
        for peer in peers:
            peer.close()


def test_what_is_no_socket_stays(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(RuntimeError, match="a file lies there that is no socket"):
        listen(path)
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to("/dev/null")
    with pytest.raises(RuntimeError, match="no socket"):
        listen(path)


def test_a_path_that_no_socket_can_have_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="can have 107 bytes; give a shorter one"):
        listen(folder / ("x" * 120))


def test_a_folder_where_others_may_write_is_refused_and_so_are_those_below(folder: Path) -> None:
    """They could put a folder of theirs in the place of the one below."""
    below = folder / "mine" / "deeper"
    below.mkdir(parents=True, mode=0o700)
    folder.chmod(0o777)
    linked = folder.parent / f"{folder.name}-link"
    linked.symlink_to(below)
    places = [place / "socket" for place in (folder, below, linked)]
    try:
        for path in places:
            with pytest.raises(ValueError, match=r"others may write into .* give a path in a folder of your own"):
                listen(path)
    finally:
        linked.unlink()
    folder.chmod(0o1777)  # as /tmp: nobody can replace a file of another
    for path in places[:2]:
        with listen(path):
            pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    os.chown(folder, 12345, 12345)
    with pytest.raises(ValueError, match="a folder of your own"):
        listen(folder / "socket")
    os.chown(folder, 0, 0)


def test_of_many_that_begin_at_once_one_listens(path: Path) -> None:
    left_behind(path)
    listening, refused = [], []

    def begin() -> None:
        try:
            listening.append(listen(path))
        except RuntimeError as error:
            refused.append(error)

    with ThreadPoolExecutor(12) as pool:
        for _ in range(12):
            pool.submit(begin)
    assert (len(listening), len(refused)) == (1, 11)
    assert connects(path)
    listening[0].close()


def test_a_folder_that_is_locked_is_not_waited_for_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_file, "_PATIENCE", 0.02)
    with socket_file._alone_in(path.parent), pytest.raises(RuntimeError, match="another process has locked the folder"):
        listen(path)


def test_the_socket_of_a_successor_is_not_removed(path: Path) -> None:
    listen(path).close()
    with listen(path):
        remove(path)
        assert connects(path)
    remove(path)
    assert not path.exists()
    remove(path)
