// What a sandbox may reach, with E2B's JavaScript client. tests/e2b/test_network.py runs it, with servers to reach.

import assert from 'node:assert/strict'
import { test } from 'node:test'

import { ALL_TRAFFIC, CommandExitError, Sandbox } from 'e2b'

const { ONE, OTHER } = process.env // URLs
const denied = (box, url) => assert.rejects(box.commands.run(`curl -sSpf ${url}`), CommandExitError)
const allowed = async (box, url) => assert.equal((await box.commands.run(`curl -sSpf ${url}`)).exitCode, 0)

test('what is allowed comes before what is denied, and can be changed', async () => {
  const box = await Sandbox.create({
    network: { allowOut: ['one.test'], denyOut: ({ allTraffic }) => [allTraffic] },
  })
  try {
    await allowed(box, ONE)
    await denied(box, OTHER)
    await box.updateNetwork({ denyOut: [new URL(OTHER).hostname] })
    await allowed(box, ONE)
    await denied(box, OTHER)
    await box.updateNetwork({})
    await allowed(box, OTHER)
  } finally {
    await box.kill()
  }
})

test('the internet can be declined', async () => {
  const box = await Sandbox.create({ allowInternetAccess: false })
  try {
    await denied(box, ONE)
    const info = await box.getInfo()
    assert.equal(info.allowInternetAccess, false)
    assert.deepEqual(info.network.denyOut, [ALL_TRAFFIC])
  } finally {
    await box.kill()
  }
})
