"""Frames between the host and a guest, and their messages.

A frame is `u32 header length, u32 body length` (big endian), a JSON object, raw bytes. Descriptors ride on
the frame by SCM_RIGHTS; the header says how many as `"fds": n`. Each reader treats the other side as hostile:
lengths are bounded before anything is buffered, and a frame that breaks a rule ends the connection.

There are three kinds of channel, each a UNIX stream socket pair.

NURSERY (host <-> zygote)
  zygote -> host  {"ev":"ready","seconds":s}                           imports are done
                  {"ev":"failed","message":..}                         they were not; the zygote ends
  host -> zygote  {"do":"spawn","cell":name,"spec":{..}}  fds=[init's channel, kernel 0's channel, stdout, stderr,
                                                          cgroup entrances.., mounts of volumes..]
                  Kernel 0 starts by itself as soon as the walls stand; spec.token is its token.
  zygote -> host  {"ev":"spawned","cell":name}            fds=[pidfd]
                  {"ev":"kernel_exited","cell":name,..}                as init says it of other kernels
                  {"ev":"spawn_failed","cell":name,"message":..}
  host -> zygote  {"do":"seed","cell":name,"spec":{..}}   fds=[its socket, cgroup entrances..]; see `fork_server`

INIT (host <-> pid 1 of a sandbox)
  init -> host    {"ev":"fatal","message":..}    the walls could not be put up; it ends
  host -> init    {"id":n,"do":verb,..} [body] [fds]   a request; sent early, it waits until the walls stand.
                                                 Pipes and channels are the host's, and come with it
  init -> host    {"id":n,"ok":{..}} [body] [fds]   its answer, or
                  {"id":n,"err":{"code":code,"message":..}}            code as in cloche.errors
  init -> host    {"ev":"kernel_exited","kernel":k,"status":wait status,"cpu":s,"rss":bytes}
                  {"ev":"branch_ended","kernel":k}  a copy has ended; how, the kernel that forked it knows
                  {"ev":"process_exited","process":p,"status":wait status}
                  {"ev":"changes","watch":w,"changes":[[kind, path],..],"missed":true if some could not be seen}
                  {"ev":"over_memory","kernel":k}   best effort without cgroups: init ended that kernel
                  {"ev":"seed_wanted"}           a program needs a fork server
                  {"ev":"seed_lost"}
  host -> init    {"do":"seed"}                  fds=[a socket] of a fork server; none if there is none. No answer
  Verbs:
  configure       env (base for all that starts later), cwd, user, sudo (see `sudo_server`); and
                  where the host has no cgroups for it: processes, data_bytes and open_files (per
                  process), watch_memory_bytes (all together)
  kernel_start    kernel, token, language, user, cwd, env, memory_bytes, fds=[channel, stdout, stderr]
                                               ok {"pid"}
  kernel_signal   kernel, signal, group, brief?   group: the kernel's whole session, not only its process group
                                               brief: they stand still, and cannot end now
  kernel_branched kernel, of, pid              ok {}: that process, which kernel `of` has forked, is a kernel
  process_start   process, argv | command | script, user, env, cwd, stdin: bool, pty: [rows, cols] | null,
                  make_cwd: bool (else a cwd that is not there is an error)
                  script: {"name","argv":[..],"awaits":bool,"tools":{..}|null}: a Python program, body=source,
                  in a fork with everything imported; awaits: with await outside of functions; tools: see `tools`
                  fds=[stdout, stderr(, stdin)], none with a pty
                                               ok {"pid"}, with a pty fds=[its master]
  process_signal  process, signal, brief?
  process_list    ok {"processes":[{id,pid,command,user,cwd,started_at},..]}
  file_read       path, user, max_inline, offset (0; of what is relayed, see below)
                                               ok {"size","modified_at"} + body, or fds=[regular file, read only]
  file_write      path, user, mode | null, size   size known and small: the body is the content; ok {info}
                  owner: user | null           owner of it, and of the directories made for it
                  attributes: {"space","values":{..}} | null
                  in_place: bool               the file itself is overwritten, and not replaced by another
                  below: directory | null      fails if it, or a path between the two, is a symlink
                  with "stream": true, write: w, fds=[pipe]   ok {}; w is a name of the host's choice
  write_end       write, commit, size          commit: the received data, if `size` bytes; ok {info}
                                               not: as if there had been no file_write; ok {}
                                               The pipe's end alone decides nothing. Where init fails, it closes
                                               the pipe, and says why when a commit is asked for.
  file_list       path, user, depth            ok {"truncated":bool}, body={"files":[info,..]} as JSON, every
                                               directory before its entries; empty if truncated
  file_stat       path, user                   ok {info}
  file_make_dir   path, user, owner | null     ok {info,"created":bool}
  file_move       path, to, user, owner | null ok {info}
  file_remove     path, user, below (as above) ok {}
  tree_survey     path, user, depth, since_ns, body={relative path: size} of those that are known
                                               ok {"truncated":bool,"passed":{why: count},"at_ns"},
                                               body={"files":[[path, size, SHA-256 | null],..],"empty":[..]}
  tree_guard      path, paths (relative to it) ok {"missing":[..]}: these are no files; the others are root's now
  watch_start     watch, path, user, recursive ok {}
  watch_stop      watch                        ok {}
  watch_collect                                ok {}, after the events of all that was done before
  usage                                        ok {"memory_bytes","space_bytes","cpu_milliseconds"}, of all of it
  port_connect    port, six: bool              ok {}, fds=[TCP socket, connected or about to be]
  door_open       port (0: a free one)         ok {"port"}, fds=[TCP socket that listens on loopback]
  terminal_resize process, rows, columns       ok {}, of a terminal that is relayed
  Where a guest can pass no descriptor, a request that would be answered with one has fds=[a socket] and
  "relay": true, or for door_open "relay": the name of a socket of the host's. See `cloche.guest.init.relays`.
  stirring        process | kernel             ok {"stirring":bool}: whether its session runs just now
  trust           path, system                 ok {}; body=certificates; see `certificates`

KERNEL (host <-> one kernel, passed through init's hands at kernel_start)
  kernel -> host  {"ev":"ready"}                                  and "next":n, as below
  host -> kernel  {"do":"configure","env":{..},"cwd":path|null,"limits":{"processes","data_bytes","open_files"}}
                                                                  before the first execution; no answer
                  {"do":"rehearse"}                               before the first: do as in one, and forget it
                  {"do":"execute","run":r,"env":{..},"cwd":path|null,"input":bool,"display_bytes":n,
                   "argv":[..]|null,"show":[..]}                  body=code; argv is its sys.argv; show: see
                                                                  `cloche.model.Showing`; and, where there are
                   "next":n                                       its count, if the kernel has said that; and
                   "tools":{..}                                   tools for it: see `guest.kernel.tools`, for
                                                                  bash {"define":script,"names":[..]}
                  {"do":"inspect","ask":s}                        between two executions: its names are told
                  {"do":"input","text":..} | {"do":"input","error":..}
                  {"do":"interrupt","run":r}                      its process group gets SIGINT next; for a kernel
                                                                  that must know the sender of that signal
                  {"do":"branch","branch":k,"token":t}            fds=[channel, stdout, stderr]: fork; the copy
                                                                  says "ready" there. Between runs only
                  {"do":"collect"}                                copies have ended: say how
                  {"do":"attend"}                                 fds=[socket]: answer the questions there, see
                                                                  ASSISTANT. Python only. No answer
  kernel -> host  {"ev":"started","run":r,"count":n}              unless it knows its count ("next")
                  {"ev":"display","run":r,"main":b,"id":s|null,"update":b,"parts":[[mime,length],..],"mark":m}
                                                                  body=the parts, one after the other
                  {"ev":"cleared","run":r,"wait":b,"mark":m}
                  {"ev":"input","run":r,"prompt":..,"secret":b,"mark":m}
                  {"ev":"raised","run":r,"name","value","mark":m} body=traceback
                  {"ev":"wrote","run":r,"file":info}
                  {"ev":"truncated","run":r,"stream":"display","dropped":n}
                  {"ev":"ended","run":r,"outcome":"ok|raised|interrupted","exit":n|null,"cpu":s,"rss":bytes,
                   "mark":m}
                                                                  and, from a kernel that does nothing until the
                                                                  next execution, its count as "next":n: with that
                                                                  it has started when it was sent, and is not told
                  {"ev":"inspected","ask":s,"more":n}             body=[..], of `cloche.variables.Variable`; or
                                                                  with "problem":.. why there is none
                  {"ev":"branched","branch":k,"pid":n} | {"ev":"refused","branch":k,"message":..}
                  {"ev":"collected","branch":k,"status":wait status,"cpu":s,"rss":bytes}
  Parts of a display: JSON for `*json` MIME types, raw bytes for BINARY_MIMES, UTF-8 text for the rest.

ASSISTANT (host <-> one kernel, the socket of its "attend"): answered beside the running cell, one after another
  host -> kernel  {"do":"complete","ask":s,"cursor":n}            body=code
                  {"do":"describe","ask":s,"cursor":n,"detail":b} body=code
                  {"do":"check","ask":s}                          body=code
  kernel -> host  {"ask":s} and a body, or {"ask":s,"problem":type of an exception}; of a completion
                  {"start":n,"end":n,"matches":[..],"types":[..]}, of a description {"found":b,"text":..},
                  of a check {"status":"complete|incomplete|invalid","indent":n}
  The kernel closes it before it makes a copy of itself.

THE TOOLS' DOOR (any program of a sandbox <-> host, TCP on its loopback, on which the host accepts)
  A connection is for calls that are made together. Fields end in NUL, which neither JSON nor shell words have.
  program -> host  TOKEN NUL COUNT NUL (NAME NUL INPUT NUL) * COUNT    INPUT: a JSON object. TOKEN: the caller's
                   COUNT 0: one call that comes alone, as a shell's do; others of its round may follow
  host -> program  PLACE " " ("ok" | "error") " " SIZE LF, SIZE bytes  of the call in that PLACE (from 0), in any
                                                                  order: its result as JSON, or why there is none;
                                                                  -1 is for all of them. After the last it closes
  A program that closes first gives up its calls.

Marks keep the order between a kernel's frames and its output to its stdout and stderr pipes, which the host
reads itself. Before a frame with mark m the kernel flushes and writes `mark_bytes(token, m)` to both pipes,
and then sends the frame. So when the host has the frame, the mark is in the pipes: it reads up to it, emits
that text, then the frame's event; a mark seen before its frame holds that stream back. Only the kernel's own
ordering depends on its honesty. At the end of a cell the mark is null if both pipes are empty: the host has
read all that came before. That spares two writes and two wake-ups where nothing was printed.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Iterator

FRAME_PREFIX = struct.Struct(">II")
MAX_HEADER = 4 << 20
MAX_VALUES_FROM_GUEST = 200_000  # in a header: three times what the text of an error can look like
MAX_BODY_FROM_GUEST = 64 << 20
MAX_LISTING_BYTES = 16 << 20  # of a directory: what a host makes of it takes several times as much
MAX_BODY_FROM_HOST = 256 << 20
MAX_FDS = 20
_RIGHTS_BYTES = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)  # no member of an enumeration, which each call would look into
INLINE_BYTES = 256 << 10

MARK_START = b"\x1b]cloche;"
MARK_LENGTH = len(MARK_START) + 16 + 1 + 8 + 1


class WireError(Exception):
    """The other side broke the protocol."""


def _make_header_encoder():
    """An encoder made once, which `json.JSONEncoder` makes anew for every value; without checks for cycles."""
    plain = json.JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    pieces = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(pieces(value, 0))


_encode_header = _make_header_encoder()
_scan_json = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # typeshed leaves it out


def encode_json(value: object) -> bytes:
    """A JSON body in ASCII."""
    return _encode_header(value).encode()


def mark_bytes(token: str, mark: int) -> bytes:
    """The mark in an output pipe at the position of frame `mark`.

    `token` is 16 hex digits, new for each kernel.
    """
    return MARK_START + token.encode() + b";%08x\x07" % (mark & 0xFFFFFFFF)


def encode_frame(header: dict, body: bytes = b"") -> bytes:
    """One frame as bytes. Lone surrogates in header strings survive as JSON escapes. Raises WireError if too large."""
    head = _encode_header(header).encode()
    if len(head) > MAX_HEADER:
        raise WireError(f"a request of {len(head)} bytes is over the limit of {MAX_HEADER}")
    return FRAME_PREFIX.pack(len(head), len(body)) + head + body


class FrameDecoder:
    """Turns received bytes into frames: `feed(data)`, then iterate `frames()`."""

    def __init__(self, max_body: int, max_values: int = MAX_HEADER):
        self._max_body = max_body
        self._max_values = max_values
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def frames(self) -> Iterator[tuple]:
        """Yields (header, body) for each whole frame. Raises WireError on anything malformed."""
        while len(self._buffer) >= FRAME_PREFIX.size:
            head, body = FRAME_PREFIX.unpack_from(self._buffer)
            if head > MAX_HEADER or body > self._max_body:
                raise WireError(f"frame of {head}+{body} bytes is over the limit")
            end = FRAME_PREFIX.size + head + body
            if len(self._buffer) < end:
                return
            header = self._decode_header(bytes(self._buffer[FRAME_PREFIX.size : FRAME_PREFIX.size + head]))
            content = bytes(self._buffer[FRAME_PREFIX.size + head : end])
            del self._buffer[:end]
            yield header, content

    def _decode_header(self, data: bytes) -> dict:
        # Counted before it is parsed, in strings too: what is small as text can take a second and 100 MiB as objects.
        if sum(map(data.count, (b"[", b"{", b","))) > self._max_values:
            raise WireError("frame header has too many values")
        try:
            text = data.decode()
            header, end = _scan_json(text, 0)  # what json.loads comes to, by four functions less
        except (ValueError, RecursionError, StopIteration) as error:
            raise WireError("frame header is not JSON") from error
        if end != len(text) or not isinstance(header, dict):
            raise WireError("frame header is not one object")
        return header


def send_frame(sock: socket.socket, header: dict, body: bytes = b"", fds: tuple = ()) -> None:
    """Sends one frame on a blocking socket."""
    if fds:
        header = {**header, "fds": len(fds)}
    data = encode_frame(header, body)
    sent = 0
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = sock.sendmsg([data], rights)
    if sent < len(data):
        sock.sendall(memoryview(data)[sent:])


def receive_some(sock: socket.socket, size: int = 1 << 16) -> tuple:
    """One recvmsg: (data, [fds]). Received descriptors are close-on-exec. data is b"" at the end of the stream."""
    data, ancillary, _flags, _address = sock.recvmsg(size, _RIGHTS_BYTES, _CLOEXEC)
    if not ancillary:
        return data, []
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


class FrameReader:
    """Blocking reader of frames from a socket, for the guest's side: `next()` gives (header, body, fds)."""

    def __init__(self, sock: socket.socket, max_body: int = MAX_BODY_FROM_HOST):
        self._sock = sock
        self._decoder = FrameDecoder(max_body)
        self._ready: list = []
        self._fds: list = []

    def next(self) -> tuple | None:
        """The next frame, or None at the end of the stream."""
        while not self._ready:
            if not self.pump():
                return None
        return self._ready.pop(0)

    def pump(self) -> bool:
        """Reads once and keeps the whole frames for `take()`. False at the end of the stream. Raises WireError."""
        data, fds = receive_some(self._sock)
        self._fds += fds
        if not data:
            return False
        if len(self._fds) > 4 * MAX_FDS:
            raise WireError("descriptors that no frame announces")
        self._decoder.feed(data)
        for header, body in self._decoder.frames():
            self._ready.append((header, body, self._claim_descriptors(header.pop("fds", 0))))
        return True

    def _claim_descriptors(self, count: object) -> list:
        if type(count) is not int or not 0 <= count <= min(MAX_FDS, len(self._fds)):
            raise WireError(f"a frame announces {count!r} descriptors, {len(self._fds)} came")
        claimed, self._fds = self._fds[:count], self._fds[count:]
        return claimed

    def take(self) -> list:
        """The frames that are ready, without reading."""
        ready, self._ready = self._ready, []
        return ready
