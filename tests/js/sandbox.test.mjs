// E2B's JavaScript client for files, commands, terminals and lifetimes.
import assert from 'node:assert/strict'
import { get } from 'node:http'
import { after, before, test } from 'node:test'
import { text } from 'node:stream/consumers'

import { CommandExitError, FileNotFoundError, Sandbox } from 'e2b'

let box

before(async () => {
  box = await Sandbox.create({ timeoutMs: 120_000, metadata: { made: 'by a test' }, envs: { GREETING: 'hello' } })
})
after(async () => {
  await box?.kill()
})

test('files are written, read, listed, moved and removed', async () => {
  const info = await box.files.write('notes/a.txt', 'text')
  assert.equal(info.path, '/home/user/notes/a.txt')
  assert.equal(await box.files.read('/home/user/notes/a.txt'), 'text')
  await box.files.rename('notes/a.txt', 'notes/b.txt')
  assert.deepEqual((await box.files.list('notes')).map(({ name }) => name), ['b.txt'])
  await box.files.remove('notes')
  assert.equal(await box.files.exists('notes'), false)
  await assert.rejects(box.files.read('notes/b.txt'), FileNotFoundError)
})

test('bytes survive the way there and back', async () => {
  const bytes = new Uint8Array(5_000_000).map((_, index) => (index * 31) & 255)
  await box.files.write('/tmp/bytes', bytes.buffer)
  assert.deepEqual(await box.files.read('/tmp/bytes', { format: 'bytes' }), bytes)
})

test('signed URLs need no key', async () => {
  await box.files.write('/home/user/signed file.txt', 'signed')
  const url = await box.downloadUrl('/home/user/signed file.txt', { useSignatureExpiration: 10_000 })
  assert.equal(await (await fetch(url)).text(), 'signed')
  const unsigned = await fetch(url.replace(/signature=[^&]*/, 'signature=v1_wrong'))
  assert.equal(unsigned.status, 401)
})

test('a directory is watched', async () => {
  await box.files.makeDir('/tmp/watched')
  const names = []
  let seen
  const written = new Promise((resolve) => (seen = resolve))
  const handle = await box.files.watchDir('/tmp/watched', (event) => {
    names.push(event.name)
    if (event.type === 'write') seen()
  })
  await box.files.write('/tmp/watched/new.txt', 'x')
  await written
  await handle.stop()
  assert.ok(names.every((name) => name === 'new.txt'))
})

test('a command has its output, its environment and its exit status', async () => {
  const { stdout, stderr, exitCode } = await box.commands.run('echo "$GREETING $EXTRA"; echo oops >&2', {
    envs: { EXTRA: 'you' },
  })
  assert.deepEqual([stdout, stderr, exitCode], ['hello you\n', 'oops\n', 0])
  await assert.rejects(box.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
})

test('a command in the background gets input and is killed', async () => {
  let seen
  const echoed = new Promise((resolve) => (seen = resolve))
  const command = await box.commands.run('cat', { background: true, stdin: true, onStdout: seen })
  await box.commands.sendStdin(command.pid, 'line\n')
  await echoed
  assert.ok((await box.commands.list()).some(({ pid }) => pid === command.pid))
  assert.equal(await command.kill(), true)
  await assert.rejects(command.wait(), CommandExitError)
  assert.equal(command.stdout, 'line\n')
})

test('root is root, and sudo makes one', async () => {
  assert.equal((await box.commands.run('whoami')).stdout, 'user\n')
  assert.equal((await box.commands.run('whoami', { user: 'root' })).stdout, 'root\n')
  assert.equal((await box.commands.run('sudo whoami')).stdout, 'root\n')
})

test('a terminal echoes, resizes and ends', async () => {
  let text = ''
  const terminal = await box.pty.create({ cols: 80, rows: 24, onData: (data) => (text += new TextDecoder().decode(data)) })
  await box.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await box.pty.sendInput(terminal.pid, new TextEncoder().encode('tput cols; exit\n'))
  await terminal.wait()
  assert.match(text, /100/)
})

test('it is found by its metadata, and its lifetime can be set', async () => {
  const paginator = Sandbox.list({ query: { metadata: { made: 'by a test' } } })
  assert.ok((await paginator.nextItems()).some(({ sandboxId }) => sandboxId === box.sandboxId))
  await box.setTimeout(200_000)
  const { startedAt, endAt } = await box.getInfo()
  assert.ok(endAt - startedAt > 150_000)
  assert.equal((await Sandbox.connect(box.sandboxId)).sandboxId, box.sandboxId)
})

// By name, where the system's resolver does not know names below localhost. fetch() sends no Host of its caller's.
const pageOf = (url, host) =>
  new Promise((resolve, reject) => get(url, { headers: { host } }, (answer) => resolve(text(answer))).on('error', reject))

test('a program that listens is reached through the server', async () => {
  await box.files.write('/tmp/site/index.html', 'a page')
  const listening = await box.commands.run('cd /tmp/site && python3 -m http.server 8080', { background: true })
  const url = new URL('/index.html', process.env.E2B_SANDBOX_URL)
  const headers = { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': '8080' }
  let answer
  for (let tries = 0; tries < 100; tries++) {
    answer = await fetch(url, { headers })
    if (answer.status !== 502) break
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  assert.equal(await answer.text(), 'a page')
  const host = box.getHost(8080)
  assert.equal(host, `8080-${box.sandboxId}.localhost:${url.port}`)
  assert.equal(await pageOf(url, host), 'a page')
  await listening.kill()
})

test('a paused sandbox goes on, with its memory and without', async () => {
  const going = await box.commands.run('sleep 600', { background: true })
  await box.files.write('kept.txt', 'kept')
  assert.equal(await box.pause(), true)
  assert.equal(await box.pause(), false)
  assert.equal(await box.isRunning(), false)
  assert.equal((await box.getInfo()).state, 'paused')
  await box.connect()
  assert.ok((await box.commands.list()).some(({ pid }) => pid === going.pid))
  assert.equal(await box.pause({ keepMemory: false }), true)
  await box.connect()
  assert.deepEqual(await box.commands.list(), [])
  assert.equal(await box.files.read('kept.txt'), 'kept')
})

test('sandboxes are made from a snapshot, and forked', async () => {
  await box.files.write('kept.txt', 'kept')
  const { snapshotId, names } = await box.createSnapshot({ name: 'made-by-javascript' })
  assert.deepEqual(names, ['made-by-javascript'])
  const listed = await box.listSnapshots().nextItems()
  assert.deepEqual(listed.map((each) => each.snapshotId), [snapshotId])
  const made = [await Sandbox.create('made-by-javascript'), ...(await box.fork({ count: 2 }))]
  for (const each of made) assert.equal(await each.files.read('kept.txt'), 'kept')
  await Promise.all(made.map((each) => each.kill()))
  assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
})
