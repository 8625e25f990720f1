"""The COPY step of a build: copies files out of an archive.

Runs inside a sandbox, as root, as a program of its own.

    python3 copying.py ARCHIVE SOURCE TARGET UID MODE

The archive holds the files that SOURCE, a path or a pattern, matched at the client. A directory's contents
land in TARGET; a file becomes TARGET, or lands in it where that is a directory or ends with a slash; the
matches of a pattern land in TARGET, with the directories below the pattern's fixed part. Files that were
there are replaced, directories are not. All that is made belongs to UID.
"""

import errno
import os
import shutil
import stat
import sys
import tarfile

_PATTERN = set("*?[{")


def copy_archive(archive, source, target, uid, mode):
    """Copies the members of the archive; returns how many were made. Raises OSError, tarfile.TarError."""
    source = os.path.normpath(source)
    with tarfile.open(archive) as packed:
        members = [member for member in packed if _is_inside(member.name)]
        place = _target_mapper(source, target, members)
        made: list = []
        for member in members:
            path = place(os.path.normpath(member.name))
            if path is not None:
                _make_parents(os.path.dirname(path), made)
                if _make_entry(packed, member, path):
                    made.append((path, member.mode & 0o777))
    for path, own_mode in reversed(made):  # directories last, so that those without leave are filled by then
        _set_owner(path, uid, own_mode if mode is None else mode)
    return len(made)


def _is_inside(name):
    parts = name.split("/")
    return not name.startswith("/") and ".." not in parts


def _target_mapper(source, target, members):
    """A function from a member's name to its target path; it returns None for members outside the source."""
    if source == ".":
        return lambda name: os.path.normpath(os.path.join(target, name))
    if _PATTERN & set(source):
        fixed = _fixed_part(source)
        return lambda name: _rebase_path(name, fixed, target)
    kinds = {os.path.normpath(member.name): member for member in members}
    single = kinds.get(source)
    if single is not None and not single.isdir():
        into = target.endswith("/") or os.path.isdir(target)
        path = os.path.join(target, os.path.basename(source)) if into else target
        return lambda name: os.path.normpath(path) if name == source else None
    return lambda name: _rebase_path(name, source, target)


def _fixed_part(pattern):
    """The directories before the first part with a wildcard."""
    parts = pattern.split("/")
    fixed = []
    for part in parts[:-1]:
        if _PATTERN & set(part):
            break
        fixed.append(part)
    return "/".join(fixed)


def _rebase_path(name, directory, target):
    if not directory:
        return os.path.normpath(os.path.join(target, name))
    if name == directory:
        return os.path.normpath(target)
    if not name.startswith(directory + "/"):
        return None
    return os.path.normpath(os.path.join(target, name[len(directory) + 1 :]))


def _make_parents(directory, made):
    missing = []
    while directory and not os.path.lexists(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    for each in reversed(missing):
        os.mkdir(each, 0o755)
        made.append((each, 0o755))


def _make_entry(packed, member, path):
    """Whether something was made: devices and the like are left out, and a directory may be there already."""
    if member.isdir():
        if os.path.isdir(path):
            return False
        _remove_path(path)
        os.mkdir(path, 0o755)
        return True
    if not (member.isreg() or member.islnk() or member.issym()):
        return False
    _remove_path(path)
    if member.issym():
        os.symlink(member.linkname, path)
        return True
    source = packed.extractfile(member)
    with source, open(path, "xb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
    return True


def _remove_path(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _set_owner(path, uid, mode):
    if not stat.S_ISLNK(os.lstat(path).st_mode):
        os.chmod(path, mode)
    try:
        os.chown(path, uid, uid, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):  # where there is but one identity
            raise


def main():
    archive, source, target, uid, mode = sys.argv[1:]
    try:
        count = copy_archive(archive, source, target, int(uid), int(mode, 8) if mode else None)
    except (OSError, tarfile.TarError, EOFError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{count} files and directories")
    return 0


if __name__ == "__main__":
    sys.exit(main())
