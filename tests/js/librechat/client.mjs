// The released @librechat/agents and what LibreChat sends beside it, as LibreChat calls them (its crud.js, process.js).
import { createHash, createPrivateKey, randomUUID, sign } from 'node:crypto'
import { subscribe } from 'node:diagnostics_channel'
import { createRequire } from 'node:module'
import { Agent } from 'node:http'
import path from 'node:path'

const base = process.env.LIBRECHAT_CODE_BASEURL
const plain = base.replace(/\/\/.*@/, '//') // without a key in it
const key = process.env.CLOCHE_KEY
const { require, home } = installed(process.env.CLIENT_MODULES)
export const { tool } = require('@langchain/core/tools')
export const { AIMessage } = require('@langchain/core/messages')
const axios = require('axios')
const FormData = require('form-data')

function installed(modules) {
  const require = createRequire(path.join(modules, 'here.js'))
  return { require, home: path.join(modules, '@librechat/agents') }
}

const { version } = require(path.join(home, 'package.json'))
export const since = (wanted) => version.localeCompare(wanted, 'en', { numeric: true }) >= 0
export const agents = since('3.9') ? require('@librechat/agents') : parts()

// Old releases load every provider of models at once: of those, what is asked for here, file by file.
function parts() {
  const names = ['CodeExecutor', 'BashExecutor', 'ProgrammaticToolCalling', 'BashProgrammaticToolCalling', 'ToolNode']
  const there = since('3.1') ? names : ['CodeExecutor', 'ToolNode']
  return Object.assign({}, ...there.map((name) => require(path.join(home, `dist/cjs/tools/${name}.cjs`))))
}

// Every request that this process sends, by axios or by node-fetch: `POST /exec`.
export const wire = []
subscribe('http.client.request.start', ({ request }) => {
  wire.push(`${request.method} ${request.path.replace(/^.*\/v1(?=\/)/, '').replace(/\?.*/, '')}`)
})

// --- who asks -------------------------------------------------------------------------------------------------------

const signingKey = process.env.CODEAPI_JWT_PRIVATE_KEY
const base64Url = (value) => Buffer.from(value).toString('base64url')

// A user's token as packages/api/src/auth/codeapi.ts of LibreChat mints it.
export function mintCodeApiToken(user, changed = {}) {
  const now = Math.floor(Date.now() / 1000)
  const context = {
    principal_source: 'librechat_jwt',
    role: 'USER',
    sub: user.id,
    tenant_id: user.tenantId ?? 'legacy',
  }
  const canonical = { chc_user_id: '', org_id: '', ...context, service_id: '' }
  const auth_context_hash = createHash('sha256').update(JSON.stringify(canonical)).digest('hex')
  const times = { iat: now, nbf: now, exp: now + 300 }
  const claims = {
    iss: 'librechat',
    aud: 'codeapi',
    ...context,
    ...times,
    jti: randomUUID(),
    auth_context_hash,
    ...changed,
  }
  const header = { alg: 'EdDSA', typ: 'JWT', kid: 'lc-codeapi-2026-05' }
  const input = `${base64Url(JSON.stringify(header))}.${base64Url(JSON.stringify(claims))}`
  return `${input}.${base64Url(sign(null, Buffer.from(input), createPrivateKey(signingKey)))}`
}

// The user whose requests are sent: with a token where the server checks them, else with the key.
export const user = { id: '6630f2a1c0ffee0123456789' }
export const authHeaders = () => ({ Authorization: `Bearer ${signingKey ? mintCodeApiToken(user) : key}` })

// --- the tools of the package ---------------------------------------------------------------------------------------

let calls = 0
export const call = (t, args, extra = {}, config = {}) => {
  calls += 1
  return t.invoke({ name: t.name, args, id: `tc_${calls}`, type: 'tool_call', ...extra }, config)
}

// By which LibreChat names a conversation's lasting session.
export const hint = () => `v2:conversation:${randomUUID().replaceAll('-', '')}`

export const execute = (options = {}) => agents.createCodeExecutionTool({ authHeaders, ...options })
export const bash = (options = {}) => agents.createBashExecutionTool({ authHeaders, ...options })

// A conversation: the ToolNode hands on the files of each call to the next one, as the graph of an agent has it.
export function conversation(options = {}, { files = [], ...more } = {}) {
  const sessions = new Map()
  if (files.length) sessions.set('execute_code', { session_id: files[0].storage_session_id, files, lastUpdated: 0 })
  const tools = [execute(options), bash(options)]
  const node = new agents.ToolNode({ tools, sessions, handleToolErrors: true, ...more })
  const invoke = async (name, args) => {
    calls += 1
    const message = new AIMessage({ content: '', tool_calls: [{ id: `tc_${calls}`, name, args, type: 'tool_call' }] })
    const answer = await node.invoke([message], { configurable: { thread_id: 't1' } })
    return (answer.messages ?? answer)[0]
  }
  const known = () => (sessions.get('execute_code')?.files ?? []).map((file) => file.name).sort()
  return {
    sessions,
    known,
    py: (code) => invoke('execute_code', { lang: 'py', code }),
    sh: (command) => invoke('bash_tool', { command }),
    refs: () => sessions.get('execute_code')?.files ?? [],
  }
}

export const toRef = (file) => ({
  id: file.id,
  resource_id: file.resource_id ?? file.id,
  name: file.name,
  storage_session_id: file.storage_session_id,
  kind: 'user',
})

// --- LibreChat's own requests: api/server/services/Files/Code/crud.js and process.js --------------------------------

const common = { httpAgent: new Agent({ keepAlive: false }), httpsAgent: undefined }
const headers = (more = {}) => ({ 'User-Agent': 'LibreChat/1.0', ...authHeaders(), ...more })
const MAX_FILE_SIZE = 150 * 1024 * 1024

export const query = ({ kind, id, version }) => {
  const params = new URLSearchParams({ kind, id })
  if (version != null) params.set('version', String(version))
  return `?${params.toString()}`
}

function form({ kind, id, version, read_only }, files) {
  const form = new FormData()
  form.append('kind', kind)
  form.append('id', id)
  if (version != null) form.append('version', String(version))
  if (read_only) form.append('read_only', 'true')
  for (const { content, name } of files) {
    const nested = name.includes('/') ? { filepath: name } : {}
    form.append('file', content, { filename: path.posix.basename(name), ...nested })
  }
  return form
}

function upload(route, form, more) {
  const sent = { ...form.getHeaders(), 'Content-Type': 'multipart/form-data', 'User-Id': user.id, ...more }
  const limits = { timeout: 120000, maxContentLength: MAX_FILE_SIZE, maxBodyLength: MAX_FILE_SIZE }
  return axios.post(`${base}/${route}`, form, { headers: headers(sent), ...common, ...limits })
}

export async function uploadCodeEnvFile(identity, content, name, more = {}) {
  const { data } = await upload('upload', form(identity, [{ content, name }]), more)
  if (data.message !== 'success') throw new Error(`Error uploading file: ${data.message}`)
  return { storage_session_id: data.storage_session_id, file_id: data.files[0].fileId, answer: data }
}

export async function batchUploadCodeEnvFiles(identity, files, more = {}) {
  const { data } = await upload('upload/batch', form(identity, files), more)
  if (!data.storage_session_id || !Array.isArray(data.files)) throw new Error('Unexpected batch upload response')
  if (data.message === 'error') throw new Error('All files in batch upload failed')
  return data
}

export const download = (session, file, identity, more = {}) =>
  axios({
    method: 'get',
    url: `${base}/download/${session}/${file}${query(identity)}`,
    responseType: 'arraybuffer',
    headers: headers(more),
    ...common,
    timeout: 15000,
  })

export async function getSessionInfo(session, file, identity, more = {}) {
  const url = `${base}/sessions/${session}/objects/${file}${query(identity)}`
  const response = await axios({ method: 'get', url, headers: headers(more), ...common, timeout: 5000 })
  return response.data
}

// Both routes, the second where the first is not there.
export async function deleteCodeEnvFile(session, file, identity, more = {}) {
  const asked = { method: 'delete', headers: headers({ 'X-CodeAPI-Expected-Profile': 'default', ...more }), ...common }
  const urls = [`sessions/${session}/objects/${file}`, `files/${session}/${file}`]
  const said = []
  for (const url of urls) {
    const answer = await axios({
      ...asked,
      timeout: 15000,
      url: `${base}/${url}${query(identity)}`,
      validateStatus: null,
    })
    said.push(answer.status)
    if (![404, 405].includes(answer.status)) break
  }
  return said
}

export async function exec(body, more = {}) {
  const sent = headers({ 'Content-Type': 'application/json', ...more })
  const asked = { method: 'post', url: `${base}/exec`, data: body, headers: sent, ...common, timeout: 15000 }
  return (await axios(asked)).data
}

export async function readSandboxFile(file_path, more = {}) {
  const safePath = `'${file_path.replace(/'/g, `'\\''`)}'`
  const result = await exec({ lang: 'bash', code: `cat ${safePath}`, ...more })
  if (result.stderr && (result.stdout == null || result.stdout === '')) throw new Error(String(result.stderr).trim())
  return result.stdout == null ? null : { content: String(result.stdout) }
}

export async function readSandboxImage(file_path, more = {}, { limit = 5 << 20, chunk = 32 * 1024 } = {}) {
  const parts = []
  let offset = 0
  for (;;) {
    const asked = { file_path, limit, offset, chunk }
    const payload = Buffer.from(JSON.stringify(asked), 'utf8').toString('base64')
    const code = [
      "python3 - <<'PY'",
      'import base64, json, os, stat',
      `payload = ${JSON.stringify(payload)}`,
      "data = json.loads(base64.b64decode(payload).decode('utf-8'))",
      "p = data['file_path']",
      "limit = data['limit']",
      "offset = data['offset']",
      "chunk = data['chunk']",
      'try:',
      '    st = os.stat(p)',
      'except OSError as e:',
      '    print(json.dumps({"error": str(e)}))',
      '    raise SystemExit(0)',
      'if not stat.S_ISREG(st.st_mode):',
      '    print(json.dumps({"error": "not a regular file"}))',
      '    raise SystemExit(0)',
      'if st.st_size > limit:',
      '    print(json.dumps({"too_large": True, "bytes": st.st_size}))',
      '    raise SystemExit(0)',
      "with open(p, 'rb') as f:",
      '    f.seek(offset)',
      '    raw = f.read(chunk)',
      'print(json.dumps({"total": st.st_size, "n": len(raw), "b64": base64.b64encode(raw).decode("ascii")}))',
      'PY',
    ].join('\n')
    const result = await exec({ lang: 'bash', code, ...more })
    const said = JSON.parse(String(result.stdout).trim().split('\n').pop())
    if (said.b64 == null) return said
    parts.push(Buffer.from(said.b64, 'base64'))
    offset += said.n
    if (said.n === 0 || offset >= said.total) return Buffer.concat(parts)
  }
}

export async function writeSandboxFile(file_path, content, more = {}) {
  const content_b64 = Buffer.from(content, 'utf8').toString('base64')
  const payload = Buffer.from(JSON.stringify({ file_path, content_b64 }), 'utf8').toString('base64')
  const code = [
    "python3 - <<'PY'",
    'import base64, json, os',
    `payload = ${JSON.stringify(payload)}`,
    "data = json.loads(base64.b64decode(payload).decode('utf-8'))",
    "path = data['file_path']",
    "content = base64.b64decode(data['content_b64'])",
    'parent = os.path.dirname(path)',
    'if parent:',
    '    os.makedirs(parent, exist_ok=True)',
    "with open(path, 'wb') as f:",
    '    f.write(content)',
    'print(f"WROTE {len(content)} bytes to {path}")',
    'PY',
  ].join('\n')
  return exec({ lang: 'bash', code, ...more })
}

// The only request that LibreChat sends with the fetch of Node.js.
export async function prewarm(runtime_session_hint) {
  const sent = { ...headers({ 'Content-Type': 'application/json' }), 'X-CodeAPI-Expected-Profile': 'stateful' }
  const body = JSON.stringify({ lang: 'bash', code: 'true', runtime_session_hint })
  const signal = AbortSignal.timeout(120000)
  const response = await fetch(`${base}/exec`, { method: 'POST', headers: sent, body, signal })
  await response.arrayBuffer()
  return response.status
}

// --- LibreChat up to v0.8.5 -----------------------------------------------------------------------------------------

const old = { 'User-Agent': 'LibreChat/1.0', 'X-API-Key': key }

export const first = {
  key,
  async upload(content, name, entity_id) {
    const form = new FormData()
    if (entity_id) form.append('entity_id', entity_id)
    form.append('file', content, name)
    const sent = { ...form.getHeaders(), 'Content-Type': 'multipart/form-data', 'User-Id': user.id, ...old }
    const { data } = await axios.post(`${plain}/upload`, form, { headers: sent, ...common, timeout: 120000 })
    if (data.message !== 'success') throw new Error(`Error uploading file: ${data.message}`)
    return { session: data.session_id, file: data.files[0].fileId, answer: data }
  },
  download: (session, file) =>
    axios({
      url: `${plain}/download/${session}/${file}`,
      responseType: 'arraybuffer',
      headers: old,
      ...common,
      timeout: 15000,
    }),
  async lastModified(session, file, entity_id) {
    const params = { detail: 'summary', ...(entity_id && { entity_id }) }
    const asked = { url: `${plain}/files/${session}`, params, headers: old, ...common, timeout: 5000 }
    return (await axios(asked)).data.find(({ name }) => name.startsWith(`${session}/${file}`))?.lastModified
  },
}
