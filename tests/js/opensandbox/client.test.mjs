// The released @alibaba-group/opensandbox: commands, sessions, files and endpoints.
import assert from 'node:assert/strict'
import { createRequire } from 'node:module'
import path from 'node:path'
import { after, before, test } from 'node:test'

const require = createRequire(path.join(process.env.CLIENT_MODULES, 'here.js'))
const { ConnectionConfig, Sandbox } = require('@alibaba-group/opensandbox')
const connectionConfig = new ConnectionConfig({ domain: process.env.OPEN_SANDBOX_DOMAIN, apiKey: process.env.OPEN_SANDBOX_API_KEY })

let box
before(async () => {
  box = await Sandbox.create({ connectionConfig, image: 'python:3.12', timeoutSeconds: 600, metadata: { of: 'js' } })
})
after(async () => {
  await box.kill()
  await box.close()
})

const text = (messages) => messages.map((each) => each.text)

test('a command has output line by line, and an exit code', async () => {
  const done = await box.commands.run('echo one; echo two; echo three >&2; exit 4')
  assert.deepEqual([text(done.logs.stdout), text(done.logs.stderr)], [['one', 'two'], ['three']])
  assert.deepEqual([done.error.name, done.error.value], ['CommandExecError', '4'])
})

test('a session keeps its directory', async () => {
  const session = await box.commands.createSession({ workingDirectory: '/tmp' })
  await box.commands.runInSession(session, 'cd /var')
  assert.deepEqual(text((await box.commands.runInSession(session, 'pwd')).logs.stdout), ['/var'])
  await box.commands.deleteSession(session)
})

test('files are written and read', async () => {
  await box.files.writeFiles([{ path: '/tmp/a/b.txt', data: 'of Node.js', mode: 644 }])
  assert.equal(await box.files.readFile('/tmp/a/b.txt'), 'of Node.js')
  assert.equal((await box.files.getFileInfo(['/tmp/a/b.txt']))['/tmp/a/b.txt'].mode, 644)
})

test('it is described, renewed and measured', async () => {
  assert.equal((await box.getInfo()).metadata.of, 'js')
  await box.renew(900)
  assert.ok((await box.getMetrics()).memoryTotalMiB > 0)
  assert.match((await box.getEndpoint(8080)).endpoint, /\/proxy\/8080$/)
})
