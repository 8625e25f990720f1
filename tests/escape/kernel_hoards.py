"""Programs that hold as much of one kind of kernel memory as they get, until they are told to go.

Each is the body of `hoard()`, which several processes run at a time; its variables live as long as they do.
"""

from __future__ import annotations

HOLDING = "/tmp/holding"  # a file of the sandbox, when they have all they get

BODIES = {
    "netlink dumps": """
    end = time.monotonic() + 6
    while len(held) < 1000 and time.monotonic() < end:
        sock = socket.socket(16, 3, 0); held.append(sock); sock.setblocking(False)
        sock.setsockopt(1, 8, 1 << 30)
        for _ in range(1200): sock.send(DUMP)
""",
    "netlink requests": """
    end = time.monotonic() + 6
    while len(held) < 1000 and time.monotonic() < end:
        sock = socket.socket(16, 3, 0); held.append(sock); sock.setblocking(False)
        sock.setsockopt(1, 7, 1 << 30)
        for _ in range(200): sock.send(DUMP)
        for size in (7 << 20, 400 << 10, 200 << 10):
            try: sock.send(struct.pack("IHHIIB3x", size, 18, 0x301, 1, 0, 0) + bytes(size - 20)); break
            except OSError: pass
""",
    "tcp": """
    server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen(1000)
    while len(held) < 400:
        left = socket.create_connection(server.getsockname(), 1); held.append(left)
        right, _ = server.accept(); held.append(right)
        for each in (left, right):
            each.setblocking(False); each.setsockopt(1, 7, 1 << 30); each.setsockopt(1, 8, 1 << 30)
            try:
                while each.send(BLOCK): pass
            except OSError: pass
""",
    "udp": """
    while len(held) < 400:
        sock = socket.socket(2, 2); held.append(sock); sock.bind(("127.0.0.1", 0)); sock.connect(sock.getsockname())
        sock.setsockopt(1, 8, 1 << 30); sock.setblocking(False)
        try:
            for _ in range(150): sock.send(BLOCK[:60_000])
        except OSError: pass
""",
    "packet options of IPv6": """
    packet_information = struct.pack("QII", 36, 41, 2) + bytes(24)
    while len(held) < 4000:
        sock = socket.socket(10, 2); held.append(sock)
        try: sock.setsockopt(41, 6, packet_information * 1400)
        except OSError: break
""",
    "keys of TCP's MD5": """
    while len(held) < 3000:
        sock = socket.socket(2, 1); held.append(sock)
        try:
            for key in range(250):
                address = struct.pack("HH4B", 2, 0, 10, 0, key, 1) + bytes(120)
                sock.setsockopt(6, 14, address + struct.pack("HHI", 0, 16, 0) + b"k" * 80)
        except OSError: pass
""",
    "unix streams": """
    while len(held) < 400:
        pair = socket.socketpair(); held.extend(pair)
        for each in pair:
            each.setblocking(False); each.setsockopt(1, 7, 1 << 30)
            try:
                while each.send(BLOCK): pass
            except OSError: pass
""",
    "unix datagrams": """
    while len(held) < 400:
        pair = socket.socketpair(1, 2); held.extend(pair)
        for each in pair:
            each.setblocking(False); each.setsockopt(1, 7, 1 << 30)
            try:
                while each.send(BLOCK[:200000]): pass
            except OSError: pass
""",
    "files without a name": """
    while len(held) < 40:
        held.append(os.memfd_create("x"))
        for _ in range(32): os.write(held[-1], BLOCK)
""",
    "shared segments": """
    libc.shmat.restype = ctypes.c_void_p; libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    libc.shmdt.argtypes = [ctypes.c_void_p]
    while len(held) < 1200:
        number = libc.shmget(0, 1 << 20, 0o1600)
        if number < 0: break
        held.append(number); place = libc.shmat(number, None, 0); ctypes.memset(place, 1, 1 << 20); libc.shmdt(place)
""",
    "shared mappings": """
    while len(held) < 40:
        held.append(mmap.mmap(-1, 32 << 20))
        for _ in range(32): held[-1].write(BLOCK)
        held[-1].madvise(mmap.MADV_DONTNEED)
""",
    "message queues": """
    message = ctypes.create_string_buffer(8200); ctypes.c_long.from_buffer(message).value = 1
    while len(held) < 32000:
        number = libc.msgget(0, 0o1600)
        if number < 0: break
        held.append(number)
        for _ in range(2): libc.msgsnd(number, message, 8192, 0o4000)
""",
    "semaphores": """
    while len(held) < 1000:
        number = libc.semget(0, 32000, 0o1600)
        if number < 0: break
        held.append(number)
""",
    "posix queues": """
    import itertools
    while len(held) < 2000:
        queue = libc.mq_open(b"/q%d-%d" % (os.getpid(), len(held)), os.O_CREAT | os.O_RDWR, 0o600, None)
        if queue < 0: break
        held.append(queue)
        for _ in range(10): libc.mq_send(queue, BLOCK[:8192], 8192, 0)
""",
    "pipes": """
    while len(held) < 2000:
        read, write = os.pipe(); held.append(read); os.set_blocking(write, False)
        try: fcntl.fcntl(write, 1031, 1 << 20)
        except OSError: pass
        try: os.write(write, BLOCK)
        except OSError: pass
""",
    "epoll": """
    pipes = [os.pipe()[0] for _ in range(500)]
    while len(held) < 3000:
        held.append(select.epoll())
        for each in pipes: held[-1].register(each, 1)
""",
    "inotify": """
    while len(held) < 1000:
        number = libc.inotify_init1(0)
        if number < 0: break
        held.append(number)
        for at in range(2000):
            os.makedirs(f"/tmp/watched/{at}", exist_ok=True)
            if libc.inotify_add_watch(number, b"/tmp/watched/%d" % at, 0x300) < 0: break
""",
    "timers": """
    event, timer = struct.pack("qii48x", 0, 0, 1), ctypes.c_int()
    number = ctypes.c_long(NUMBERS["timer_create"])
    while len(held) < 200_000 and libc.syscall(number, 1, event, ctypes.byref(timer)) == 0: held.append(0)
""",
    "timer descriptors": """
    while True: held.append(libc.timerfd_create(1, 0)); held[-1] < 0 and full()
""",
    "event descriptors": """
    while True: held.append(libc.eventfd(0, 0)); held[-1] < 0 and full()
""",
    "terminals": """
    while len(held) < 1000:
        controller, terminal = os.openpty(); held.extend((controller, terminal))
        for each in held[-2:]:
            os.set_blocking(each, False)
            try:
                while os.write(each, BLOCK[:4096]): pass
            except OSError: pass
""",
    "queued signals": """
    import signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [34])
    while len(held) < 500_000 and libc.sigqueue(os.getpid(), 34, ctypes.c_long(0)) == 0: held.append(0)
""",
    "memberships of groups": """
    import itertools
    number = itertools.count(os.getpid() << 16)
    while True:
        sock = socket.socket(10, 2); held.append(sock)
        for _ in range(20):
            sock.setsockopt(41, 20, bytes((255, 1)) + bytes(10) + struct.pack(">I", next(number)) + struct.pack("I", 1))
""",
    "memberships of IPv4 groups": """
    import itertools
    number = itertools.count((os.getpid() & 0xfff) << 16)
    while True:
        sock = socket.socket(2, 2); held.append(sock)
        for _ in range(20): sock.setsockopt(0, 35, struct.pack(">II", 0xe8000000 + next(number), 0x7f000001))
""",
    "closed connections": """
    server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen(1000)
    end = time.monotonic() + 6
    while time.monotonic() < end:
        sock = socket.socket(); sock.bind((f"127.{os.getpid() % 200}.{random() % 250}.{random() % 250}", 0))
        sock.connect(server.getsockname())
        server.accept()[0].close(); sock.close()
""",
    "access lists": """
    users = [struct.pack("<HHI", 2, 6, 1 + at % 4000) for at in range(8000)]
    others = b"".join(struct.pack("<HHI", each, 4, 0xffffffff) for each in (4, 16, 32))
    rights = struct.pack("<IHHI", 2, 1, 6, 0xffffffff) + b"".join(users) + others
    while len(held) < 1000:
        path = f"/tmp/{os.getpid()}-{len(held)}"
        os.mkdir(path); held.append(0)
        for kind in ("access", "default"): os.setxattr(path, f"system.posix_acl_{kind}", rights)
""",
    "descriptors in flight": """
    import array
    null = os.open("/dev/null", 0)
    rights = [(1, 1, array.array("i", [null] * 250))]
    while True:
        left, right = socket.socketpair(); held.extend((left, right)); left.setblocking(False)
        try:
            while True: left.sendmsg([b"x"], rights)
        except BlockingIOError: pass
""",
}

_PROGRAM = """
import fcntl, mmap, select, struct, time
BLOCK = bytes(1 << 20)
DUMP = struct.pack("IHHIIB3x", 20, 18, 0x301, 1, 0, 0)
def full(): raise OSError
def random(): return int.from_bytes(os.urandom(2), "big")
def hoard(held):
{body}
mine = []
read, write = os.pipe()
children = []
for _ in range({processes}):
    try: child = os.fork()
    except OSError: break
    if child == 0:
        problem = ""
        os.close(read)
        try: hoard(mine)
        except BaseException as error: problem = repr(error)
        os.write(write, (f"{{len(mine)}} {{problem[:120]}}\\n").encode()); os.close(write)
        time.sleep(60)
        os._exit(0)
    children.append(child)
os.close(write)
told = open(read).read().splitlines()
print(told[:3], len(told), flush=True)
open("{holding}", "w").close()
time.sleep(60)
"""


def hoard_program(name: str, processes: int) -> str:
    """The program of `processes` that hoard that each."""
    return _PROGRAM.format(body=BODIES[name].strip("\n"), processes=processes, holding=HOLDING)


def host_available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
