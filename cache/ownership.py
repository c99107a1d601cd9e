"""Access to directories and files that no other user can have written, through descriptors only.

Compiled kernels are native code, and the cache deletes whole trees. Running that code and deleting
trees are safe only in a directory that belongs to the user. So a path is walked once, component by
component; the open directory is checked, and all later access goes through the open directory's
descriptor. Another user with write access to a directory above can rename the cache, but no more:
that user's replacement directory is refused, and that user's links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DamagedEntry, RefusedEntry

if TYPE_CHECKING:
    from typing_extensions import Self

# O_DIRECTORY too, because O_PATH alone does not trigger an automounter.
_TRAVERSE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40  # Linux's own limit
_ROOT_UID = 0


class Directory:
    """An open directory. Closed by `close`, or at the end of a `with` block.

    Its methods raise RefusedEntry for anything that a user outside `owners` owns or may write to.
    The methods' OSErrors name the whole path.

    Attributes:
        fd: the directory's descriptor, for use as `dir_fd` but not for reading.
        path: the directory's path, for messages only.
        owners: the user ids that may own the directory and everything in it.
    """

    def __init__(self, fd: int, path: Path, owners: frozenset[int]) -> None:
        self.fd, self.path, self.owners = fd, path, owners

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self.fd)

    def at(self, name: str) -> Path:
        """A path to `name` that leads through the descriptor, for this process and its children."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}/{name}")

    def status(self, name: str) -> os.stat_result:
        """The lstat result of `name`."""
        with self.named(name):
            return os.lstat(name, dir_fd=self.fd)

    def names(self) -> list[str]:
        """The names in the directory, sorted."""
        with self.named("."), self.readable() as fd:
            return sorted(os.listdir(fd))

    def directory(self, name: str) -> Directory:
        """Open a subdirectory. Raises NotADirectoryError for anything that is neither a directory
        nor a link."""
        path = self.path / name
        with self.named(name):
            try:
                fd = os.open(name, _TRAVERSE, dir_fd=self.fd)
            except NotADirectoryError:
                refuse_strangers(path, os.lstat(name, dir_fd=self.fd), self.owners)
                raise
        return _checked(Directory(fd, path, self.owners))

    def make(self, name: str, mode: int) -> Directory:
        """Open a subdirectory; create a missing one."""
        with self.named(name), contextlib.suppress(FileExistsError):
            os.mkdir(name, mode & 0o700, dir_fd=self.fd)
            if mode & ~0o700:
                os.chmod(name, mode, dir_fd=self.fd)  # mkdir applied the umask
        return self.directory(name)

    def file(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
        """A descriptor of a regular file. Raises DamagedEntry for anything that is neither a file
        nor a link."""
        path = self.path / name
        with self.named(name):
            with contextlib.suppress(FileNotFoundError):
                # Checked before opening: opening a device may have effects; opening a link fails.
                _check_file(path, os.lstat(name, dir_fd=self.fd), self.owners)
            flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
            fd = os.open(name, flags, mode, dir_fd=self.fd)
        try:
            _check_file(path, os.fstat(fd), self.owners)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def move(self, name: str, to: Directory, new_name: str) -> None:
        """Rename into another directory. A directory without write permission is first made
        writable."""
        with self.named(name):
            try:
                os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=to.fd)
            except PermissionError:  # a move writes the moved directory's ".."
                if not self.make_accessible(name):
                    raise
                os.rename(name, new_name, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def remove(self, name: str) -> None:
        """Delete `name`, with everything in it if it is a directory. Links are not followed.

        Raises OSError if something remains.
        """
        with self.named(name):
            if not stat.S_ISDIR(os.lstat(name, dir_fd=self.fd).st_mode):
                os.unlink(name, dir_fd=self.fd)
                return
            try:
                shutil.rmtree(self.at(name), ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    self.make_accessible(name)
                    for top, directories, _ in os.walk(self.at(name)):
                        for item in directories:
                            with Directory(os.open(top, _TRAVERSE), self.path, self.owners) as at:
                                at.make_accessible(item)
                    shutil.rmtree(self.at(name))
            except RecursionError:
                raise OSError(errno.ENOTEMPTY, "nested too deeply to be deleted") from None

    def make_accessible(self, name: str) -> bool:
        """Give the owner all rights to a directory. Return whether that changed anything."""
        status = os.lstat(name, dir_fd=self.fd)
        if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o700 == 0o700:
            return False
        os.chmod(name, stat.S_IMODE(status.st_mode) | 0o700, dir_fd=self.fd)
        return True

    def sync(self) -> None:
        """Write the directory's names to disk."""
        with self.named("."), self.readable() as fd:
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems refuse
                    raise

    @contextlib.contextmanager
    def readable(self) -> Iterator[int]:
        """A descriptor for reading the directory's names."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Make OSErrors name the whole path, because the system sees only a part."""
        try:
            yield
        except OSError as error:
            path = self.path if name == "." else self.path / name
            raise OSError(error.errno, error.strerror, str(path)) from error


def open_directory(path: Path, owners: frozenset[int], make_mode: int | None = None) -> Directory:
    """Open the directory at an absolute path. With `make_mode`, create a missing directory.

    Links on the way are followed if they belong to root or to one of `owners`. Directories above
    are created with the user's umask.

    Raises FileNotFoundError, NotADirectoryError or another OSError, and RefusedEntry.
    """
    names = [name for name in reversed(path.parts) if name != "/"]
    here = Directory(os.open("/", _TRAVERSE), Path("/"), owners)
    links = 0
    while names:
        name = names.pop()
        try:
            if make_mode is None:
                fd = os.open(name, _TRAVERSE, dir_fd=here.fd)
            else:
                fd = _open_or_make(here, name, 0o777 if names else make_mode, chmod=not names)
        except NotADirectoryError:
            with here, here.named(name):
                target = _link_target(here, name)
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
                names += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                fd = os.open("/" if target.startswith("/") else ".", _TRAVERSE, dir_fd=here.fd)
            here = Directory(fd, Path("/") if target.startswith("/") else here.path, owners)
        except OSError:
            with here, here.named(name):
                raise
        else:
            here.close()
            here = Directory(fd, here.path / name, owners)
    return _checked(here)


def _open_or_make(here: Directory, name: str, mode: int, *, chmod: bool) -> int:
    try:
        return os.open(name, _TRAVERSE, dir_fd=here.fd)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=here.fd)
            if chmod:
                os.chmod(name, mode, dir_fd=here.fd)
        return os.open(name, _TRAVERSE, dir_fd=here.fd)


def _link_target(here: Directory, name: str) -> str:
    """The target of a link, if it belongs to root or to one of the owners."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here.fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISLNK(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if status.st_uid not in here.owners | {_ROOT_UID} and not _may_be_root(here, status):
            raise RefusedEntry(
                f"{here.path / name} is a symbolic link of uid {status.st_uid}, who can lead it "
                "anywhere: give the directory itself"
            )
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def _may_be_root(here: Directory, link: os.stat_result) -> bool:
    """Whether a link may belong to root outside the user namespace, for example of a container.

    In a user namespace all unmapped users have one id. So nobody else may write to the link's
    directory.
    """
    unnamed = int(Path("/proc/sys/kernel/overflowuid").read_text())
    all_named = "4294967295" in Path("/proc/self/uid_map").read_text().split()
    holder = os.fstat(here.fd)
    return link.st_uid == holder.st_uid == unnamed and not all_named and not holder.st_mode & 0o022


def _checked(directory: Directory) -> Directory:
    try:
        refuse_strangers(directory.path, os.fstat(directory.fd), directory.owners)
    except BaseException:
        directory.close()
        raise
    return directory


def _check_file(path: Path, status: os.stat_result, owners: frozenset[int]) -> None:
    refuse_strangers(path, status, owners)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedEntry(f"{path} is not a regular file (mode {stat.filemode(status.st_mode)})")


def refuse_strangers(path: Path, status: os.stat_result, owners: frozenset[int]) -> None:
    """Raise RefusedEntry if a user outside `owners` owns or may write to the file of `status`."""
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid not in owners:
        problem = f"belongs to uid {status.st_uid}, not to " + " or ".join(map(str, sorted(owners)))
    elif mode & 0o022:
        problem = "can be written by others"
    else:
        return
    raise RefusedEntry(
        f"{path} {problem} (owner uid {status.st_uid}, mode {mode:04o})",
        "it is native code, or holds some, which is loaded only from where nobody else can have "
        "put it. Make it yours with chown and chmod go-w, or name another one (CUTE_ATTN_CACHE_DIR "
        "for the cache)",
    )
