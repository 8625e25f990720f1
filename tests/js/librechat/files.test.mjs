// Files with @librechat/agents and with the requests that LibreChat sends beside it.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import {
  agents,
  authHeaders,
  batchUploadCodeEnvFiles,
  call,
  conversation,
  deleteCodeEnvFile,
  download,
  exec,
  execute,
  getSessionInfo,
  readSandboxFile,
  readSandboxImage,
  since,
  toRef,
  uploadCodeEnvFile,
  user,
  writeSandboxFile,
} from './client.mjs'

const ID = /^[A-Za-z0-9_-]{21}$/
const mine = { kind: 'user', id: user.id }
const base = process.env.LIBRECHAT_CODE_BASEURL

// --- through the ToolNode -------------------------------------------------------------------------------------------

test('what one call makes, the next one has, by any tool', async () => {
  const talk = conversation()
  const code = [
    'open("a.txt", "w").write("one\\n")',
    'import os',
    'os.makedirs("d/é ü")',
    'open("d/é ü/b.mp3", "wb").write(b"\\0\\xff")',
  ]
  const first = await talk.py(code.join('\n'))
  assert.match(first.content, /Generated files:\nSession files: 2 persisted/)
  assert.deepEqual(talk.known(), ['a.txt', 'd/é ü/b.mp3'])
  for (const file of talk.refs()) assert.match(file.id, ID)
  const second = await talk.sh("cat a.txt; od -An -tx1 'd/é ü/b.mp3'; echo two >> a.txt")
  assert.match(second.content, /^stdout:\none\n 00 ff\n/)
  assert.match(second.content, /1 persisted/, 'only what changed is new')
  const third = await talk.py('print(open("/mnt/data/a.txt").read())')
  assert.match(third.content, /one\ntwo/)
  assert.doesNotMatch(third.content, /Generated files/, 'nothing changed')
  assert.deepEqual(talk.known(), ['a.txt', 'd/é ü/b.mp3'])
})

test('a changed file has a new id and says what it was', async () => {
  const talk = conversation()
  await talk.py('open("a.csv", "w").write("1")')
  const [old] = talk.refs()
  const answer = await exec({ lang: 'bash', code: 'echo 2 > a.csv', files: [toRef(old)] })
  const [file] = answer.files
  assert.equal(file.name, 'a.csv')
  assert.notEqual(file.id, old.id)
  assert.deepEqual([file.modified_from.id, file.modified_from.storage_session_id], [old.id, old.storage_session_id])
  const was = await download(old.storage_session_id, old.id, mine)
  assert.equal(was.data.toString(), '1', 'the old one is as it was')
})

test('an unchanged file is inherited, with the ids it had', async () => {
  const talk = conversation()
  await talk.py('open("a.csv", "w").write("1")')
  const [old] = talk.refs()
  const { files } = await exec({ lang: 'bash', code: 'cat a.csv', files: [toRef(old)] })
  assert.deepEqual(
    [files[0].id, files[0].storage_session_id, files[0].inherited],
    [old.id, old.storage_session_id, true],
  )
})

test('a deleted file is gone for the next call', { skip: !since('3.9') }, async () => {
  const talk = conversation()
  await talk.sh('echo 1 > gone.txt; echo 2 > stays.txt')
  const answer = await talk.sh('rm gone.txt')
  assert.deepEqual(answer.artifact.deleted_files, ['gone.txt'])
  assert.deepEqual(talk.known(), ['stays.txt'])
  assert.equal((await talk.sh('ls')).content.split('\n')[1], 'stays.txt')
})

test('a picture is one', async () => {
  const talk = conversation()
  const code = 'import matplotlib.pyplot as plt\nplt.plot([1, 3])\nplt.savefig("/mnt/data/plot.png")'
  assert.match((await talk.py(code)).content, /including 1 image/)
  const [plot] = talk.refs()
  const { data, headers } = await download(plot.storage_session_id, plot.id, mine)
  assert.equal(headers['content-type'], 'image/png')
  assert.equal(data.subarray(1, 4).toString(), 'PNG')
  const read = await readSandboxImage('/mnt/data/plot.png', { files: [toRef(plot)] }, { chunk: 8192 })
  assert.ok(read.equals(data), 'read piece by piece, as LibreChat does for a model that sees')
})

test('a failed program has its files, too', async () => {
  const talk = conversation()
  const answer = await talk.py('open("half.txt", "w").write("half")\nraise ValueError("no")')
  assert.match(answer.content, /ValueError: no/)
  assert.deepEqual(talk.known(), ['half.txt'])
})

test('a reference that leads nowhere spoils only itself', async () => {
  const talk = conversation()
  await talk.sh('echo here > here.txt')
  const lost = { ...toRef(talk.refs()[0]), id: 'A'.repeat(21), name: 'lost.txt' }
  const answer = await exec({ lang: 'bash', code: 'ls', files: [lost, ...talk.refs().map(toRef)] })
  assert.match(answer.stdout, /here\.txt/)
  assert.match(answer.stderr, /lost\.txt/)
})

test('two files of one name do not stop a conversation', async () => {
  const one = await uploadCodeEnvFile(mine, Buffer.from('1'), 'same.txt')
  const two = await uploadCodeEnvFile(mine, Buffer.from('2'), 'same.txt')
  const refs = [one, two].map((each) => toRef({ ...each, id: each.file_id, name: 'same.txt' }))
  const answer = await exec({ lang: 'bash', code: 'cat same.txt', files: refs })
  assert.equal(answer.stdout, '2')
  assert.match(answer.stderr, /same\.txt/)
})

// --- read_file, create_file, edit_file ------------------------------------------------------------------------------

test('create_file, edit_file and read_file of LibreChat', async () => {
  const made = await writeSandboxFile('/mnt/data/notes/a b.md', '# été\n')
  assert.equal(made.stdout, 'WROTE 8 bytes to /mnt/data/notes/a b.md\n')
  const more = { session_id: made.session_id, files: made.files.map(toRef) }
  assert.deepEqual(
    made.files.map((file) => file.name),
    ['notes/a b.md'],
  )
  assert.equal((await readSandboxFile('/mnt/data/notes/a b.md', more)).content, '# été\n')
  const edited = await writeSandboxFile('/mnt/data/notes/a b.md', '# hiver\n', more)
  assert.equal(edited.files.find((file) => !file.inherited).name, 'notes/a b.md')
  const again = { files: edited.files.map(toRef) }
  assert.equal((await readSandboxFile('/mnt/data/notes/a b.md', again)).content, '# hiver\n')
  await assert.rejects(readSandboxFile("/mnt/data/it's not there"), /No such file/)
})

test('read_file reads all that LibreChat can show', async () => {
  const made = await exec({ lang: 'bash', code: 'head -c 262144 /dev/zero | tr "\\0" x > big.txt' })
  const { content } = await readSandboxFile('/mnt/data/big.txt', { files: made.files.map(toRef) })
  assert.equal(content.length, 262144)
})

test('an image over the limit, and none, are told apart', async () => {
  const made = await exec({ lang: 'bash', code: 'head -c 2000 /dev/zero > a.png' })
  const more = { files: made.files.map(toRef) }
  assert.deepEqual(await readSandboxImage('/mnt/data/a.png', more, { limit: 1000 }), { too_large: true, bytes: 2000 })
  assert.match((await readSandboxImage('/mnt/data/none.png', more)).error, /No such file/)
})

// --- uploads --------------------------------------------------------------------------------------------------------

for (const name of ['data file é.csv', '報告 (1).xlsx', "it's.tar.gz", 'no extension', '%41.txt']) {
  test(`an upload keeps its name: ${name}`, async () => {
    const content = Buffer.from([0, 1, 255, 13, 10])
    const sent = await uploadCodeEnvFile(mine, content, name)
    assert.match(sent.storage_session_id, ID)
    assert.match(sent.file_id, ID)
    assert.deepEqual(
      sent.answer.files.map((file) => file.filename),
      [name],
    )
    const ref = {
      id: sent.file_id,
      resource_id: user.id,
      storage_session_id: sent.storage_session_id,
      name,
      kind: 'user',
    }
    const talk = conversation({}, { files: [ref] })
    const answer = await talk.py(
      'import os\nfor name in os.listdir("."): print(ascii(name), list(open(name, "rb").read()))',
    )
    assert.match(answer.content, /\[0, 1, 255, 13, 10\]/)
    const escaped = answer.content.split('\n')[1].split(' [')[0].slice(1, -1)
    assert.equal(
      escaped.replace(/\\x(..)|\\u(....)/g, (_, a, b) => String.fromCharCode(parseInt(a ?? b, 16))),
      name,
    )
    const { data, headers } = await download(sent.storage_session_id, sent.file_id, mine)
    assert.ok(data.equals(content))
    assert.match(headers['content-disposition'], /^attachment; filename\*=UTF-8''/)
    assert.equal(decodeURIComponent(headers['content-disposition'].split("''")[1]), name)
  })
}

test('a skill is a batch with directories, read-only, shared by its version', async () => {
  const skill = { kind: 'skill', id: '66aa00000000000000000001', version: 3 }
  const files = ['skills/pptx/SKILL.md', 'skills/pptx/scripts/x.py', 'skills/docx/SKILL.md'].map((name) => ({
    name,
    content: Buffer.from(name),
  }))
  const sent = await batchUploadCodeEnvFiles({ ...skill, read_only: true }, files)
  assert.deepEqual([sent.message, sent.succeeded, sent.failed], ['success', 3, 0])
  assert.deepEqual(
    sent.files.map((file) => [file.status, file.filename]),
    files.map(({ name }) => ['success', name]),
  )
  const refs = sent.files.map((file) => ({
    id: file.fileId,
    resource_id: skill.id,
    storage_session_id: sent.storage_session_id,
    name: file.filename,
    kind: 'skill',
    version: 3,
  }))
  const talk = conversation({}, { files: refs })
  const answer = await talk.sh(
    'cd skills; cat pptx/SKILL.md pptx/scripts/x.py; echo; echo changed > docx/SKILL.md; cat docx/SKILL.md',
  )
  assert.match(answer.content, /skills\/pptx\/SKILL\.mdskills\/pptx\/scripts\/x\.py/)
  assert.doesNotMatch(answer.content, /Generated files/)
  const { data } = await download(sent.storage_session_id, sent.files[2].fileId, skill)
  assert.equal(data.toString(), 'skills/docx/SKILL.md')
  const other = await getSessionInfo(sent.storage_session_id, sent.files[0].fileId, { ...skill, version: 4 }).catch(
    (e) => e.response.status,
  )
  assert.equal(other, 404)
})

test('freshness, and both ways to delete', async () => {
  const agent = { kind: 'agent', id: 'agent_abc' }
  const sent = await uploadCodeEnvFile(agent, Buffer.from('x,y\n'), 'a.csv', {
    'X-CodeAPI-Expected-Profile': 'default',
  })
  const about = await getSessionInfo(sent.storage_session_id, sent.file_id, agent)
  assert.ok(Date.now() - new Date(about.lastModified) < 3600e3)
  assert.deepEqual([about.originalFilename, about.size, about.contentType], ['a.csv', 4, 'text/csv'])
  assert.deepEqual(await deleteCodeEnvFile(sent.storage_session_id, sent.file_id, agent), [200])
  const gone = await getSessionInfo(sent.storage_session_id, sent.file_id, agent).catch(
    (error) => error.response.status,
  )
  assert.equal(gone, 404)
  const again = await deleteCodeEnvFile(sent.storage_session_id, sent.file_id, agent)
  assert.ok([200, 404].includes(again.at(-1)), 'a second time is no error that LibreChat shows')
})

test('more files than are kept: the model reads how many are missing', { skip: !since('3.9') }, async () => {
  const talk = conversation()
  const answer = await talk.sh('for n in $(seq 205); do echo $n > $n.txt; done')
  assert.match(answer.content, /Artifact delivery warning: 5 of 205 generated files could not be persisted/)
  assert.equal(talk.refs().length, 200)
})

test('the files of a session are listed', async () => {
  const made = await call(execute(), { lang: 'py', code: 'for n in "ab": open(n + ".txt", "w").write(n)' })
  const session = made.artifact.session_id
  const listed = await agents.fetchSessionFiles(base, session, mine, authHeaders)
  assert.deepEqual(listed.map((file) => file.name).sort(), ['a.txt', 'b.txt'])
  for (const file of listed) {
    assert.match(file.id, ID)
    assert.deepEqual([file.storage_session_id, file.kind, file.resource_id], [session, 'user', user.id])
  }
  const answer = await exec({ lang: 'bash', code: 'cat a.txt b.txt', files: listed })
  assert.equal(answer.stdout, 'ab')
  assert.deepEqual(await agents.fetchSessionFiles(base, 'A'.repeat(21), mine, authHeaders), [])
})
