// OpenAI's JavaScript client against a gateway: responses, containers, files, chat. The model is cloche/echo.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import OpenAI, { toFile } from 'openai'

const client = new OpenAI({ maxRetries: 0 })
const model = 'cloche/echo'
const tools = [{ type: 'code_interpreter', container: { type: 'auto' } }]
const include = ['code_interpreter_call.outputs']
const fenced = (code) => '```python\n' + code + '\n```'

test('a response runs code and can be had again', async () => {
  const answer = await client.responses.create({ model, input: fenced('6 * 7'), tools, include })
  assert.equal(answer.output[0].outputs[0].logs, '42\n')
  assert.match(answer.output_text, /42/)
  const again = await client.responses.retrieve(answer.id, { include })
  assert.deepEqual(again.output, answer.output)
})

test('a stream is put together by the helper', async () => {
  const kinds = []
  const stream = client.responses.stream({ model, input: fenced('print(1)'), tools })
  for await (const event of stream) kinds.push(event.type)
  const answer = await stream.finalResponse()
  assert.equal(answer.status, 'completed')
  for (const when of ['in_progress', 'interpreting', 'completed']) {
    assert.ok(kinds.includes(`response.code_interpreter_call.${when}`))
  }
})

test('a failure is an exception of the SDK', async () => {
  await assert.rejects(client.responses.create({ model: 'none', input: '?' }), OpenAI.NotFoundError)
  const nowhere = [{ type: 'code_interpreter', container: 'cntr_none' }]
  await assert.rejects(client.responses.create({ model, input: '?', tools: nowhere }), OpenAI.NotFoundError)
})

test('files go into a container and come out of it', async () => {
  const file = await client.files.create({ file: await toFile(Buffer.from('1,2\n'), 'a.csv'), purpose: 'user_data' })
  const container = await client.containers.create({ name: 'node', file_ids: [file.id] })
  const uploaded = await client.containers.files.create(container.id, { file: await toFile(Buffer.from('x'), 'b.txt') })
  assert.equal(uploaded.path, '/mnt/data/b.txt')
  const mine = [{ type: 'code_interpreter', container: container.id }]
  const code = "open('c.txt', 'w').write(open('a.csv').read() * 2)"
  await client.responses.create({ model, input: fenced(code), tools: mine })
  const paths = {}
  for await (const each of client.containers.files.list(container.id)) paths[each.path] = each.id
  assert.deepEqual(Object.keys(paths).sort(), ['/mnt/data/a.csv', '/mnt/data/b.txt', '/mnt/data/c.txt'])
  const content = await client.containers.files.content.retrieve(paths['/mnt/data/c.txt'], { container_id: container.id })
  assert.equal(await content.text(), '1,2\n1,2\n')
  await client.containers.delete(container.id)
  await client.files.delete(file.id)
  await assert.rejects(client.containers.retrieve(container.id), OpenAI.NotFoundError)
})

test('a chat runs code, whole and streamed', async () => {
  const asked = { model, messages: [{ role: 'user', content: fenced('6 * 7') }], tools: [{ type: 'code_interpreter' }] }
  const answer = await client.chat.completions.create(asked)
  assert.match(answer.choices[0].message.content, /42/)
  const stream = client.chat.completions.stream(asked)
  assert.match(await stream.finalContent(), /42/)
})

test('models are listed', async () => {
  const names = []
  for await (const each of client.models.list()) names.push(each.id)
  assert.ok(names.includes(model))
})
