"""A file of plain arrays and one JSON text: a `.npz` that is read with care and written whole or not at all.

Nothing in such a file is executed: no pickles, no classes, no names to import. Everything that it declares (sizes,
shapes, dtypes, entries) is compared with what is there before memory is taken for it. This module must not know what
the arrays mean.
"""

import contextlib
import io
import json
import os
import re
import uuid
import zipfile
from collections.abc import Mapping
from typing import Any, Never, cast

import numpy as np

from linjac._errors import VerificationError, compose

MANIFEST = "manifest"
_TEXT_LIMIT = 64 << 20  # bytes of JSON
_DEPTH = 96  # nesting of JSON
_NAME = re.compile(r"[a-z][a-z0-9_]*\.npy")
_DATE = (1980, 1, 1, 0, 0, 0)  # the same content gives the same file
_REMEDY = "restore the file from a copy, or record it anew"


def refuse(who: str, path: str, what: str) -> Never:
    """Say that a file cannot be trusted."""
    raise VerificationError(compose(who, f"{path!r} is not a baseline that can be trusted", [what], _REMEDY))


# writing --------------------------------------------------------------------------------------------------------------
def write(path: str, kind: str, version: int, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays (plain dtypes only) and a JSON body; the old file stays until the new one is whole."""
    table = {name: {"dtype": array.dtype.str, "shape": list(array.shape)} for name, array in arrays.items()}
    manifest = {"format": kind, "version": version, "arrays": table, "body": body}
    text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False).encode()
    _replace(path, {MANIFEST: np.frombuffer(text, np.uint8), **arrays})


def _replace(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    folder, name = os.path.split(os.path.realpath(path))
    target, temporary = os.path.join(folder, name), os.path.join(folder, f".{name}.{uuid.uuid4().hex}.part")
    mode = os.stat(target).st_mode & 0o7777 if os.path.exists(target) else 0o666
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _pack(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """Make the new name durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _pack(file: Any, arrays: Mapping[str, np.ndarray]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", _DATE)
            with archive.open(entry, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(array).reshape(array.shape), allow_pickle=False)


# reading --------------------------------------------------------------------------------------------------------------
def read(who: str, path: str, kind: str, version: int) -> tuple[Any, dict[str, np.ndarray]]:
    """The body and the arrays of a file; anything that is not as it should be is refused."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            with zipfile.ZipFile(file) as archive:
                return _unpack(who, path, kind, version, archive, size)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OverflowError, OSError) as err:
            message = str(err).splitlines()[0] if str(err) else type(err).__name__
            what = "it is not a zip archive, or it is damaged"
            error = VerificationError(compose(who, f"{path!r}: {what} ({message})", remedy=_REMEDY))
            raise error from None


def _unpack(
    who: str, path: str, kind: str, version: int, archive: zipfile.ZipFile, size: int
) -> tuple[Any, dict[str, np.ndarray]]:
    entries = _entries(who, path, archive, size)
    if f"{MANIFEST}.npy" not in entries:
        refuse(who, path, "it has no manifest")
    if entries[f"{MANIFEST}.npy"].file_size > _TEXT_LIMIT:
        refuse(who, path, f"its manifest is larger than {_TEXT_LIMIT >> 20} MiB")
    raw = _array(who, path, archive, entries[f"{MANIFEST}.npy"], None)
    manifest = parse(who, path, raw.tobytes())
    _check_version(who, path, manifest, kind, version)
    check(who, path, manifest, {"format": str, "version": int, "arrays": object, "body": object}, "manifest")
    table = manifest["arrays"]
    if not isinstance(table, dict):
        refuse(who, path, f"manifest['arrays']: expected an object, got {_word(table)}")
    table = cast(dict[str, Any], table)
    for name, declared in table.items():
        check(who, path, declared, {"dtype": str, "shape": [int]}, f"manifest['arrays'][{name!r}]")
    declared_names, present = {f"{name}.npy" for name in table}, set(entries) - {f"{MANIFEST}.npy"}
    if declared_names != present:
        missing, extra = sorted(declared_names - present), sorted(present - declared_names)
        word, name = ("missing", missing[0]) if missing else ("not in its manifest", extra[0])
        refuse(who, path, f"entry {name!r} is {word}")
    return manifest["body"], {
        name: _array(who, path, archive, entries[f"{name}.npy"], declared) for name, declared in table.items()
    }


def _check_version(who: str, path: str, manifest: Any, kind: str, version: int) -> None:
    if not isinstance(manifest, dict) or cast(dict[str, Any], manifest).get("format") != kind:
        refuse(who, path, f"its manifest does not say {kind!r}")
    found = cast(dict[str, Any], manifest).get("version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        refuse(who, path, "its manifest has no version")
    if found > version:
        what = f"{path!r} was written by a newer linjac (format version {found}; this one reads up to {version})"
        raise VerificationError(compose(who, what, remedy="upgrade linjac, or record the baseline anew"))


def _entries(who: str, path: str, archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """The entries by name: plain names, each once, stored as they are, together no larger than the file."""
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if not _NAME.fullmatch(entry.filename):
            refuse(who, path, f"it has an entry with the name {entry.filename[:80]!r}")
        if entry.filename in found:
            refuse(who, path, f"it has two entries {entry.filename!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            refuse(who, path, f"entry {entry.filename!r} is compressed or encrypted, which a baseline never is")
        if entry.file_size != entry.compress_size:
            refuse(who, path, f"entry {entry.filename!r} declares two sizes")
        found[entry.filename] = entry
    if sum(entry.file_size for entry in found.values()) > size:
        refuse(who, path, "its entries declare more bytes than the file has")
    return found


def _array(who: str, path: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, declared: Any) -> np.ndarray:
    """One entry; its header is compared with the manifest, and its size with its header, before it is read."""
    name = entry.filename
    with archive.open(entry) as stream:
        content = stream.read()  # as large as the file says, which is not larger than the file is
    stream = io.BytesIO(content)
    try:
        major, _ = np.lib.format.read_magic(stream)
        if major != 1:
            raise ValueError("version")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # the parser of headers raises whatever the bytes lead it to
        refuse(who, path, f"entry {name!r} is no plain array")
    if dtype.hasobject or dtype.kind not in "biufc" or dtype.fields is not None:
        refuse(who, path, f"entry {name!r} holds objects (a pickle), which are never read")
    if declared is None:
        declared = {"dtype": "|u1", "shape": list(shape[:1])}
    if dtype.str != declared["dtype"] or list(shape) != declared["shape"] or (fortran and len(shape) > 1):
        expected = f"{declared['dtype']}{declared['shape']}"
        refuse(who, path, f"entry {name!r}: expected {expected}, got {dtype.str}{list(shape)}")
    left = len(content) - stream.tell()
    count = 1
    for length in shape:
        count *= int(length)
    if min((0, *shape)) < 0 or count * dtype.itemsize != left:
        refuse(who, path, f"entry {name!r}: its shape and its size do not agree")
    return np.frombuffer(content, dtype, count, stream.tell()).reshape(shape)


# JSON -----------------------------------------------------------------------------------------------------------------
def parse(who: str, path: str, raw: bytes) -> Any:
    """JSON without the parts that are not in the standard: no NaN, no key twice, no deep nesting."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) < len(items):
            raise ValueError("a key twice")
        return dict(items)

    def constant(_: str) -> Never:
        raise ValueError("not a number")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError):
        refuse(who, path, "its manifest is not valid JSON")
    if _too_deep(value):
        refuse(who, path, f"its manifest is nested deeper than {_DEPTH} levels")
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_DEPTH):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [x for item in containers for x in (item.values() if isinstance(item, dict) else item)]
    return True


def check(who: str, path: str, value: Any, schema: Any, name: str) -> None:
    """Compare parsed JSON with a schema: a type, a tuple of choices, `[item]`, or `{key: schema}` (exactly)."""
    if isinstance(schema, tuple):
        for choice in cast(tuple[Any, ...], schema):
            if isinstance(choice, dict | list) and isinstance(value, type(cast(Any, choice))):
                return check(who, path, value, choice, name)
        if not any(_fits(value, choice) for choice in cast(tuple[Any, ...], schema)):
            refuse(who, path, f"{name}: did not expect {_word(value)}")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            refuse(who, path, f"{name}: expected a list, got {_word(value)}")
        for i, item in enumerate(cast(list[Any], value)):
            check(who, path, item, schema[0], f"{name}[{i}]")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            refuse(who, path, f"{name}: expected an object, got {_word(value)}")
        given, wanted = cast(dict[str, Any], value), cast(dict[str, Any], schema)
        if set(given) != set(wanted):
            odd = sorted(set(given) ^ set(wanted))[0]
            refuse(who, path, f"{name}: key {odd[:80]!r} is {'missing' if odd in wanted else 'unknown'}")
        for key, inner in wanted.items():
            check(who, path, given[key], inner, f"{name}[{key!r}]")
    elif not _fits(value, schema):
        refuse(who, path, f"{name}: did not expect {_word(value)}")


def _fits(value: Any, choice: Any) -> bool:
    if not isinstance(choice, type):
        return value is None if choice is None else value == choice
    if choice is int and isinstance(value, bool):
        return False
    return isinstance(value, choice)


def _word(value: Any) -> str:
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
