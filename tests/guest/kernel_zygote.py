"""A zygote without walls, for tests: prepares once, then forks a kernel for each request on its control socket."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time


def main(control_fd: int, imports: list) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[name] = "1"
    before = set(os.listdir("/proc/self/fd"))
    started = time.perf_counter()
    from cloche.guest import wire
    from cloche.guest.kernel import kernel, written_files
    from cloche.guest.zygote import warmup

    warmup.prepare_kernel(imports)
    seconds = time.perf_counter() - started
    left = sorted(set(os.listdir("/proc/self/fd")) - before)
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=control_fd)
    wire.send_frame(control, {"ev": "ready", "seconds": seconds, "fds_left": left, "threads": threading.active_count()})
    reader = wire.FrameReader(control)
    while True:
        frame = reader.next()
        if frame is None:
            return
        header, _body, fds = frame
        if header["do"] == "wait":
            _pid, status = os.waitpid(header["pid"], 0)
            wire.send_frame(control, {"status": status})
            continue
        pid = os.fork()
        if not pid:
            control.close()
            written_files.DATA_DIRECTORY = header["data"]
            os.chdir(header["cwd"])
            os.environ.update(header.get("env", {}))
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (fds[1], 1), (fds[2], 2)):
                os.dup2(source, target)
            os.close(null)
            kernel.main(fds[0], fds[1], fds[2], header["token"])
        for fd in fds:
            os.close(fd)
        wire.send_frame(control, {"pid": pid})


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
