// LibreChat's users, each with a token that LibreChat mints: everything works for them, and nothing is another's.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import {
  agents,
  authHeaders,
  bash,
  call,
  conversation,
  deleteCodeEnvFile,
  download,
  exec,
  execute,
  getSessionInfo,
  mintCodeApiToken,
  toRef,
  tool,
  uploadCodeEnvFile,
  user,
} from '../client.mjs'

const other = { id: '6630f2a1c0ffee9876543210' }
const as = (who, changed) => ({ Authorization: `Bearer ${mintCodeApiToken(who, changed)}` })
const mine = { kind: 'user', id: user.id }
const status = (promise) =>
  promise.then(
    ({ status }) => status ?? 200,
    (error) => error.response.status,
  )
const refused = (promise) =>
  promise.then(
    () => assert.fail('it was not refused'),
    (error) => error.message,
  )

test('a user runs code, has files, and calls tools', async () => {
  const talk = conversation()
  await talk.py('open("a.txt", "w").write("mine")')
  assert.match((await talk.sh('cat a.txt')).content, /^stdout:\nmine/)
  const double = tool(({ n }) => n * 2, {
    name: 'double',
    schema: { type: 'object', properties: { n: { type: 'number' } } },
  })
  const extra = { toolMap: new Map([['double', double]]), toolDefs: [{ name: 'double', parameters: double.schema }] }
  const made = agents.createProgrammaticToolCallingTool({ authHeaders })
  assert.equal((await call(made, { code: 'print(await double(n=21))' }, extra)).content, 'stdout:\n42')
})

test('nothing of one user is another', async () => {
  const sent = await uploadCodeEnvFile(mine, Buffer.from('secret'), 'a.txt')
  const { storage_session_id: session, file_id: file } = sent
  const theirs = { kind: 'user', id: other.id }
  for (const identity of [mine, theirs]) {
    assert.equal(await status(download(session, file, identity, as(other))), 404)
    assert.equal(await status(getSessionInfo(session, file, identity, as(other))), 404)
  }
  assert.deepEqual(await agents.fetchSessionFiles(process.env.LIBRECHAT_CODE_BASEURL, session, mine, as(other)), [])
  const ref = toRef({ id: file, storage_session_id: session, name: 'a.txt' })
  const answer = await exec({ lang: 'bash', code: 'cat a.txt', files: [ref] }, as(other))
  assert.equal(answer.stdout, '')
  assert.match(answer.stderr, /a\.txt/)
  assert.equal((await exec({ lang: 'bash', code: 'cat a.txt', files: [ref] })).stdout, 'secret')
})

test('a session is of one user, whatever another one guesses', async () => {
  const options = {
    executionProfile: 'stateful',
    statefulSessions: true,
    runtimeSessionHint: 'v2:user:0123456789abcdef',
  }
  await call(bash(options), { command: 'echo mine > a.txt' })
  const found = await call(bash({ ...options, authHeaders: as(other) }), { command: 'ls' })
  assert.match(found.content, /Empty/)
})

test('an agent and a skill are shared by users, not by tenants', async () => {
  const agent = { kind: 'agent', id: 'agent_shared' }
  const { storage_session_id: session, file_id: file } = await uploadCodeEnvFile(agent, Buffer.from('shared'), 's.txt')
  assert.equal((await download(session, file, agent, as(other))).data.toString(), 'shared')
  assert.equal(await status(download(session, file, agent, as({ ...other, tenantId: 'elsewhere' }))), 404)
})

test('a token that is wrong is none', async () => {
  const now = Math.floor(Date.now() / 1000)
  const wrong = [
    { exp: now - 60, iat: now - 120 },
    { exp: now + 3600 },
    { iss: 'somebody' },
    { aud: 'else' },
    { sub: '' },
  ]
  for (const changed of wrong) {
    const message = await refused(call(execute({ authHeaders: as(user, changed) }), { lang: 'py', code: '1' }))
    assert.match(message, /not authorized/, JSON.stringify(changed))
  }
})

test('deleting is the owner', async () => {
  const { storage_session_id: session, file_id: file } = await uploadCodeEnvFile(mine, Buffer.from('x'), 'a.txt')
  assert.deepEqual(await deleteCodeEnvFile(session, file, mine, as(other)), [404, 404])
  assert.deepEqual(await deleteCodeEnvFile(session, file, mine), [200])
})
