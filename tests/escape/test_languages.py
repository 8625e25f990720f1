"""Programs of other languages stand behind the same walls."""

from __future__ import annotations

import pytest

from cloche.engine.sandboxes.sandbox import Sandbox

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(60)]

NODE = """
const fs = require('fs'), net = require('net'), os = require('os')
const attempt = (step) => { try { step(); return 'done' } catch (error) { return error.code ?? error.name } }
const connect = (host) => new Promise((done) => {
  const socket = net.connect({ host, port: 80, timeout: 3000 })
  socket.on('connect', () => done('done')).on('timeout', () => done('timeout')).on('error', (error) => done(error.code))
})
const seen = {
  shadow: attempt(() => fs.readFileSync('/etc/shadow')),
  host: attempt(() => fs.readdirSync('/work')),
  code: attempt(() => fs.appendFileSync('/opt/cloche/lib/cloche/guest/languages/node/kernel.js', '//')),
  usr: attempt(() => fs.writeFileSync('/usr/bin/x', '')),
  sysctl: attempt(() => fs.writeFileSync('/proc/sys/kernel/core_pattern', '|/x')),
  init: attempt(() => fs.readFileSync('/proc/1/mem')),
  uid: attempt(() => process.setuid(0)),
  cloud: await connect('169.254.169.254'),
  internet: await connect('1.1.1.1'),
}
Object.entries(seen).filter(([, got]) => got === 'done' || got === 'timeout').map(([name]) => name)
"""
BASH = """
try() { if "$@" >/dev/null 2>&1; then echo "$*"; fi; }
try cat /etc/shadow
try ls /work
try touch /usr/bin/x
try sh -c 'echo x > /proc/sys/kernel/core_pattern'
try cat /proc/1/environ
try unshare -r true
try mount -t tmpfs none /tmp
try sh -c 'exec 3<>/dev/tcp/1.1.1.1/80'
try bash -c 'exec 3<>/dev/tcp/169.254.169.254/80'
"""
WASM = """
const bytes = Uint8Array.from(atob('AGFzbQEAAAABBwFgAn9/AX8DAgEABwcBA2FkZAAACgkBBwAgACABags='), (c) => c.charCodeAt(0))
const { instance } = await WebAssembly.instantiate(bytes)
let hot = 0; for (let i = 0; i < 3e6; i++) hot = instance.exports.add(hot, 1)
const { Worker } = require('worker_threads')
const worker = new Worker('require("worker_threads").parentPort.postMessage(7)', { eval: true })
const answer = await new Promise((done) => worker.on('message', done))
;[hot, answer, process.permission]
"""


async def test_javascript_reaches_neither_the_host_nor_a_network(box: Sandbox):
    context = await box.create_context(language="javascript")
    assert (await context.execute(NODE).result()).text == "[]"


async def test_bash_reaches_neither_the_host_nor_a_network(box: Sandbox):
    context = await box.create_context(language="bash")
    tried = await context.execute(BASH).result()
    assert (tried.outcome, tried.stdout) == ("ok", "")


async def test_the_filter_lets_a_just_in_time_compiler_and_threads_work(box: Sandbox):
    context = await box.create_context(language="javascript")
    assert (await context.execute(WASM).result()).text == "[ 3000000, 7, undefined ]"


async def test_a_program_of_node_that_lies_to_the_host_loses_its_kernel_and_no_more(box: Sandbox):
    context = await box.create_context(language="javascript")
    for lie in ("Buffer.alloc(64, 255)", "Buffer.from([0, 0, 0, 2, 0, 0, 0, 0, 123, 125])"):
        run = await context.execute(f"require('fs').writeSync(3, {lie}); 1").result()
        assert run.outcome in ("died", "ok", "raised")
        assert (await context.execute("1 + 1").result()).text == "2"
    assert (await box.context().execute("1 + 1").result()).text == "2"
