// A user who may run one program per minute.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { bash, call } from '../client.mjs'

test('the model reads for how long to wait', async () => {
  assert.equal((await call(bash(), { command: 'echo 1' })).content, 'stdout:\n1')
  const refused = await call(bash(), { command: 'echo 2' }).catch((error) => error.message)
  assert.match(refused, /rate-limited\. Retry after \d+ seconds\./)
})
