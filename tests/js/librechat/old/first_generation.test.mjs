// LibreChat up to v0.8.5: X-API-Key, references by session_id, entity_id. Between the generations (3.1.77): no header,
// so that the key is in the URL.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { agents, AIMessage, call, first, since, tool, wire } from '../client.mjs'

const transition = since('3.1.70') // it sends no key itself
const make = (params = {}) =>
  agents.createCodeExecutionTool({
    ...(transition ? {} : { LIBRECHAT_CODE_API_KEY: first.key }),
    user_id: 'u1',
    ...params,
  })
const run = (code, params) => call(make(params), { lang: 'py', code })

test('code runs', async () => {
  const answer = await run('print("hello")')
  assert.equal(answer.content, 'stdout:\nhello')
  assert.match(answer.artifact.session_id, /^[A-Za-z0-9_-]{21}$/)
})

test(
  'files are named to the model, and mounted for the next call by the name of the session',
  { skip: transition },
  async () => {
    const made = await run('open("/mnt/data/out é.csv", "w").write("1,2\\n")')
    assert.match(made.content, /Generated files:\n- \/mnt\/data\/out é\.csv/)
    const { session_id } = made.artifact
    assert.ok(made.content.includes(session_id))
    const before = wire.length
    const again = await call(make(), { lang: 'py', code: 'print(open("/mnt/data/out é.csv").read())', session_id })
    assert.deepEqual(wire.slice(before), [`GET /files/${session_id}`, 'POST /exec'])
    assert.match(again.content, /^stdout:\n1,2/)
  },
)

test('an upload is mounted, found fresh, and downloaded', async () => {
  for (const entity_id of ['', 'agent_abc']) {
    const { session, file, answer } = await first.upload(Buffer.from('a,b\n'), 'data file é.csv', entity_id)
    assert.equal(answer.files[0].filename, 'data file é.csv')
    const files = [{ session_id: session, id: file, name: 'data file é.csv' }]
    const got = await run('import os; print(os.listdir("/mnt/data"), open("/mnt/data/data file é.csv").read())', {
      files,
    })
    assert.match(got.content, /data file é\.csv'\] a,b/)
    assert.ok(Date.now() - new Date(await first.lastModified(session, file, entity_id)) < 3600e3)
    assert.equal((await first.download(session, file)).data.toString(), 'a,b\n')
  }
})

test('what a program makes is downloaded', async () => {
  const { artifact } = await run('open("/mnt/data/a.bin", "wb").write(bytes([0, 255]))')
  const { data } = await first.download(artifact.session_id, artifact.files[0].id)
  assert.deepEqual([...data], [0, 255])
})

test('the ToolNode of this release', { skip: !transition }, async () => {
  const { session, file } = await first.upload(Buffer.from('up'), 'up.txt', '')
  const files = [{ id: file, name: 'up.txt', session_id: session }]
  const sessions = new Map([['execute_code', { session_id: session, files, lastUpdated: 0 }]])
  const node = new agents.ToolNode({ tools: [make()], sessions })
  const say = async (code) => {
    const tool_calls = [{ id: `c${wire.length}`, name: 'execute_code', args: { lang: 'py', code }, type: 'tool_call' }]
    const answer = await node.invoke([new AIMessage({ content: '', tool_calls })], { configurable: { thread_id: 't' } })
    return (answer.messages ?? answer)[0].content
  }
  assert.match(await say('print(open("up.txt").read())'), /^stdout:\nup/)
  assert.match(await say('open("n.txt", "w").write("n"); print(open("up.txt").read())'), /^stdout:\nup/)
  assert.match(await say('print(open("n.txt").read(), open("up.txt").read())'), /^stdout:\nn up/)
})

test('tools are called from Python and bash', { skip: !transition }, async () => {
  const parameters = { type: 'object', properties: { n: { type: 'number' } }, required: ['n'] }
  const toolDefs = [{ name: 'double', description: 'Twice', parameters, allowed_callers: ['code_execution'] }]
  const toolMap = new Map([['double', tool(({ n }) => n * 2, { name: 'double', schema: parameters })]])
  const py = agents.createProgrammaticToolCallingTool({})
  const code = 'import asyncio\nprint(await asyncio.gather(double(n=1), double(n=2)))'
  assert.match((await call(py, { code }, { toolMap, toolDefs })).content, /^stdout:\n\[2, 4\]/)
  const sh = agents.createBashProgrammaticToolCallingTool({})
  assert.match((await call(sh, { code: `double '{"n": 4}'` }, { toolMap, toolDefs })).content, /^stdout:\n8/)
})

test('a wrong key', { skip: transition }, async () => {
  await assert.rejects(run('1', { LIBRECHAT_CODE_API_KEY: 'wrong' }), /401/)
})
