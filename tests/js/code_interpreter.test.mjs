// E2B's JavaScript client for code, against a server whose address and key are in the environment.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'

import { Sandbox } from '@e2b/code-interpreter'

let box

before(async () => {
  box = await Sandbox.create({ timeoutMs: 120_000 })
})
after(async () => {
  await box?.kill()
})

test('state lives on between runs', async () => {
  await box.runCode('x = 20 + 1')
  assert.equal((await box.runCode('x * 2')).text, '42')
})

test('output comes while the program runs', async () => {
  const seen = []
  const execution = await box.runCode('print("one"); import sys; print("two", file=sys.stderr)', {
    onStdout: (message) => seen.push(['out', message.line]),
    onStderr: (message) => seen.push(['err', message.line]),
  })
  assert.deepEqual(execution.logs, { stdout: ['one\n'], stderr: ['two\n'] })
  assert.deepEqual(seen.sort(), [['err', 'two\n'], ['out', 'one\n']])
})

test('an exception is data', async () => {
  const { error } = await box.runCode('1 / 0')
  assert.equal(error.name, 'ZeroDivisionError')
  assert.equal(error.value, 'division by zero')
  assert.match(error.traceback, /1 \/ 0/)
})

test('text outside ASCII arrives whole', async () => {
  const { logs } = await box.runCode("print('naïve 字\u2028 🦀')")
  assert.deepEqual(logs.stdout, ['naïve 字\u2028 🦀\n'])
})

test('a plot has a picture and its data', async () => {
  const code = "import matplotlib.pyplot as plt; plt.plot([1, 2], [3, 4]); plt.title('T'); plt.show()"
  const { results } = await box.runCode(code)
  assert.equal(results.length, 1)
  assert.match(results[0].png, /^iVBOR/)
  assert.equal(results[0].chart.type, 'line')
  assert.deepEqual(results[0].chart.elements[0].points, [[1, 3], [2, 4]])
})

test('contexts are apart, and can be restarted and removed', async () => {
  const context = await box.createCodeContext({ cwd: '/tmp' })
  await box.runCode('y = 5', { context })
  assert.equal((await box.runCode('y', { context })).text, '5')
  assert.equal((await box.runCode('y')).error.name, 'NameError')
  await box.restartCodeContext(context)
  assert.equal((await box.runCode('y', { context })).error.name, 'NameError')
  assert.ok((await box.listCodeContexts()).some(({ id }) => id === context.id))
  await box.removeCodeContext(context)
  assert.ok(!(await box.listCodeContexts()).some(({ id }) => id === context.id))
})

test('JavaScript and TypeScript keep their state, and await at the top', async () => {
  await box.runCode('const a = await Promise.resolve(41)', { language: 'js' })
  assert.equal((await box.runCode('a + 1', { language: 'js' })).text, '42')
  assert.equal((await box.runCode('const n: number = 6; n * 7', { language: 'ts' })).text, '42')
})

test('bash keeps its state', async () => {
  await box.runCode('cd /tmp; name=world', { language: 'bash' })
  const { logs } = await box.runCode('echo "hello $name from $PWD"', { language: 'bash' })
  assert.equal(logs.stdout.join(''), 'hello world from /tmp\n')
})

test('a run that the client gives up does not block the next one', async () => {
  await assert.rejects(box.runCode('import time; time.sleep(300)', { timeoutMs: 1000 }))
  assert.equal((await box.runCode('1 + 1', { timeoutMs: 30_000 })).text, '2')
})

test('killing the sandbox during a run is said to be that', async () => {
  const doomed = await Sandbox.create()
  const running = doomed.runCode('import time; time.sleep(60)')
  setTimeout(() => doomed.kill(), 1000)
  await assert.rejects(running, /killed|not running|not found/)
})
