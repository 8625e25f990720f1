// Running code with @librechat/agents: what the model is told, in which languages, by whom, and when something fails.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { agents, authHeaders, bash, call, conversation, exec, execute, hint, prewarm, since, wire } from './client.mjs'

const said = async (promise) => (await promise).content
const refused = (promise) =>
  promise.then(
    () => assert.fail('it was not refused'),
    (error) => error.message,
  )

test('Python is a script: what it prints, its arguments, no echo', async () => {
  const code = 'import sys\n6 * 7\nprint("hello", sys.argv[1:])'
  const answer = await call(execute({ user_id: 'u1' }), { lang: 'py', code, args: ['--x', '1'] })
  assert.equal(answer.content, "stdout:\nhello ['--x', '1']")
  assert.match(answer.artifact.session_id, /^[A-Za-z0-9_-]{21}$/)
})

test('nothing on stdout is told, and what is on stderr', async () => {
  assert.match(await said(call(execute(), { lang: 'py', code: '1' })), /^stdout: Empty\./)
  const answer = await said(call(execute(), { lang: 'py', code: 'print("before")\nimport sys\nsys.exit("stopped")' }))
  assert.equal(answer, 'stdout:\nbefore\n\nstderr:\nstopped')
})

test('an exception is an outcome, with the line that raised it', async () => {
  const answer = await said(call(execute(), { lang: 'py', code: 'print("before")\n1 / 0' }))
  assert.match(answer, /^stdout:\nbefore\n/)
  assert.match(answer, /stderr:\nTraceback[^]*line 2[^]*ZeroDivisionError/)
})

test('bash runs in /mnt/data, and Python in its heredocs', async () => {
  const command = `pwd; python3 - <<'PY'\nimport pandas as pd\nprint(pd.Series([1, 2]).sum())\nPY`
  assert.equal(await said(call(bash(), { command })), 'stdout:\n/mnt/data\n3')
})

test('bash gets arguments', async () => {
  const answer = await said(call(bash(), { command: 'echo "$1-$2"', args: ['a b', 'c'] }))
  assert.equal(answer, 'stdout:\na b-c')
})

test('output comes as it was written', async () => {
  const answer = await exec({ lang: 'bash', code: "printf '  \\u00e9\\t\\u001b[1m中\\n\\n'" })
  assert.equal(answer.stdout, '  é\t\u001b[1m中\n\n')
  assert.deepEqual([answer.stderr, answer.code, answer.signal, answer.status], ['', 0, null, null])
})

for (const [lang, code] of [
  ['js', 'console.log([1, 2].map((n) => n * 2).join())'],
  ['ts', 'const n: number[] = [1, 2]; console.log(n.map((each: number) => each * 2).join())'],
]) {
  test(`${lang} runs`, async () => {
    assert.equal(await said(call(execute(), { lang, code })), 'stdout:\n2,4')
  })
}

test('a language that is not there is told, with those that are', async () => {
  assert.match(await said(call(execute(), { lang: 'c', code: 'int main() { return 0; }' })), /Empty/)
  const answer = await exec({ lang: 'zig', code: '' })
  assert.match(answer.stderr, /zig[^]*bash[^]*py[^]*js/)
  assert.notEqual(answer.code, 0)
})

test('fields that nobody knows are ignored', async () => {
  const code = 'echo yes'
  const answer = await exec({ lang: 'bash', code, user_id: 'u1', entity_id: 'e', files: [], new_in_2027: { a: [1] } })
  assert.equal(answer.stdout, 'yes\n')
})

test('a program over its time has its output, and the reason', { skip: !since('3.6') }, async () => {
  const answer = await exec({ lang: 'py', code: 'print("before", flush=True)\nwhile True: pass', timeout: 1000 })
  assert.deepEqual([answer.stdout, answer.status, answer.signal], ['before\n', 'TO', 'SIGKILL'])
  assert.match(answer.stderr, /\[sandbox\] Time limit exceeded/)
  assert.equal(answer.message, 'Time limit exceeded')
})

// --- sessions -------------------------------------------------------------------------------------------------------

test('a session keeps /mnt/data without any reference to files', async () => {
  const options = { executionProfile: 'stateful', statefulSessions: true, runtimeSessionHint: hint() }
  const first = await call(execute(options), { lang: 'py', code: 'open("kept.bin", "wb").write(bytes(3))' })
  assert.equal(first.artifact.runtime_status, 'new')
  const second = await call(bash(options), { command: 'stat -c %s /mnt/data/kept.bin' })
  assert.equal(second.content.split('\n')[1], '3')
  assert.equal(second.artifact.runtime_status, 'reused')
  assert.equal(second.artifact.runtime_session_id, first.artifact.runtime_session_id)
  const other = await call(bash({ ...options, runtimeSessionHint: hint() }), { command: 'ls /mnt/data' })
  assert.match(other.content, /Empty/)
})

test('prewarming is a request that Node.js sends itself, and the session is there', async () => {
  const runtimeSessionHint = hint()
  assert.equal(await prewarm(runtimeSessionHint), 200)
  const options = { executionProfile: 'stateful', statefulSessions: true, runtimeSessionHint }
  assert.equal((await call(bash(options), { command: 'echo 1' })).artifact.runtime_status, 'reused')
})

test('the default profile is served too', async () => {
  const options = { executionProfile: 'default', runtimeSessionHint: hint() }
  const answer = await call(execute(options), { lang: 'py', code: 'print(1)' })
  assert.equal(answer.content, 'stdout:\n1')
  assert.equal(answer.artifact.runtime_session_id, undefined)
})

// --- what the model reads when a request fails ----------------------------------------------------------------------

test('without a key', async () => {
  const nobody = execute({ authHeaders: { Authorization: 'Bearer e2b_wrong' } })
  assert.match(await refused(call(nobody, { lang: 'py', code: '1' })), /not authorized/)
  const anonymous = agents.createBashExecutionTool({})
  assert.match(await refused(call(anonymous, { command: 'ls /mnt/data' })), /not authorized[^]*not registered/)
})

test('through the ToolNode the model reads it, and the next call works', async () => {
  let known = false
  const talk = conversation({ authHeaders: () => (known ? authHeaders() : { Authorization: 'Bearer wrong' }) })
  const failed = await talk.sh('echo 1')
  assert.equal(failed.status, 'error')
  assert.match(failed.content, /not authorized/)
  known = true
  assert.equal((await talk.sh('echo 2')).content, 'stdout:\n2')
})

test('the base URL may carry the key, which is how LibreChat without JWT has one', async () => {
  const url = new URL(process.env.LIBRECHAT_CODE_BASEURL)
  url.username = 'librechat'
  url.password = process.env.CLOCHE_KEY
  const options = { authHeaders: undefined, baseUrl: url.toString() }
  assert.equal(await said(call(bash(options), { command: 'echo basic' })), 'stdout:\nbasic')
})

test('40 calls at once are all served', async () => {
  const before = wire.length
  const all = await Promise.all(Array.from({ length: 40 }, (_, n) => call(bash(), { command: `echo ${n}` })))
  assert.deepEqual(
    all.map((each) => each.content),
    Array.from({ length: 40 }, (_, n) => `stdout:\n${n}`),
  )
  assert.equal(wire.length - before, 40)
})
