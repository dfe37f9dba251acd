"""One Chromium per process, shared by its sessions and replaced when it has died.

Playwright lives on an event loop in a thread of its own, so that sessions of several threads wait for their pages at
the same time. `SharedBrowser.run` hands it work.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym_rl.errors import ConfigError, EnvTimeout

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
_FOLDER = "agentgym-webarena-"
"""Of the folders in which browsers keep their profiles; followed by the process's number."""
_LAUNCH_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 110.0
"""No piece of work takes so long: its own waits are shorter."""


def require_playwright() -> None:
    """Raise `ConfigError` when the package is absent."""
    if find_spec("playwright") is None:
        raise ConfigError("playwright is not installed: run pip install 'agentgym-rl[webarena]'")


def find_chromium(chosen: Path | None) -> Path:
    """The browser to start: the chosen one, that of the system, or Playwright's; raises `ConfigError` without any."""
    require_playwright()
    if chosen is not None:
        if not os.access(chosen, os.X_OK) or chosen.is_dir():
            raise ConfigError(f"chromium={str(chosen)!r}: no program")
        return chosen
    for name in _NAMES:
        if (path := shutil.which(name)) is not None:
            return Path(path)
    if (own := _browser_of_playwright()) is not None:
        return own
    raise ConfigError(
        "no Chromium: install one (Debian: apt-get install chromium; elsewhere: playwright install chromium), "
        "or name it with --chromium PATH"
    )


def _browser_of_playwright() -> Path | None:
    """What ``playwright install chromium`` has downloaded, the newest."""
    folder = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    found = sorted(folder.glob("chromium-*/chrome-linux*/chrome"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


class SharedBrowser:
    """The browser of this process. Methods may be called from any thread."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._folder: Path | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="webarena-browser", daemon=True)
        self._thread.start()
        self._launching = asyncio.Lock()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of ``work`` on the browser's loop; raises what it raises, `EnvTimeout` when it hangs."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result(_CALL_TIMEOUT_S)
        except TimeoutError:
            if running.done():  # its own
                raise
            running.cancel()
            raise EnvTimeout(f"the browser did not answer within {_CALL_TIMEOUT_S:g} s") from None

    def start(self) -> None:
        """Start it, unless it runs."""
        self.run(self._ready())

    async def _ready(self) -> Browser:
        """The running browser; another one when the last has died."""
        async with self._launching:
            if self._browser is None or not self._browser.is_connected():
                await self._stop()
                await self._start()
            assert self._browser is not None
            return self._browser

    async def open_context(self, **options: Any) -> BrowserContext:
        """A session's own cookies, storage and tabs; in a fresh browser when the last one has died."""
        return await (await self._ready()).new_context(**options)

    @property
    def is_connected(self) -> bool:
        return self._browser is not None and self._browser.is_connected()

    async def _start(self) -> None:
        from playwright.async_api import async_playwright

        _remove_folders_of_ended_processes()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        with _temporary_folder(self._folder):
            self._playwright = await async_playwright().start()
        flags = [*_FLAGS, "--no-sandbox"] if os.geteuid() == 0 else list(_FLAGS)  # Chromium refuses root its sandbox
        self._browser = await self._playwright.chromium.launch(
            executable_path=self._program,
            args=flags,
            timeout=1000 * _LAUNCH_TIMEOUT_S,
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )

    async def _stop(self) -> None:
        from playwright.async_api import Error

        browser, playwright, self._browser, self._playwright = self._browser, self._playwright, None, None
        with contextlib.suppress(Error, OSError):  # of what has died already
            if browser is not None:
                await browser.close()
        with contextlib.suppress(Error, OSError):
            if playwright is not None:
                await playwright.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """End the browser; the next context starts another one."""
        with contextlib.suppress(EnvTimeout):
            self.run(self._stop())


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Any:
    """What starts within the block keeps its temporary files there: Playwright's driver, and so the profiles."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def _remove_folders_of_ended_processes() -> None:
    """A process that was killed could not remove its own."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if pid.isdigit() and not _is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_shared: dict[Path, SharedBrowser] = {}
_making = threading.Lock()


def shared_browser(program: Path) -> SharedBrowser:
    """This process's browser of that program, started by its first context."""
    with _making:
        if program not in _shared:
            _shared[program] = SharedBrowser(program)
            atexit.register(_shared[program].close)
        return _shared[program]
