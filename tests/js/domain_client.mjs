// E2B's JavaScript client as a program that knows a domain and a certificate only. Prints JSON.
//
// Run with E2B_API_KEY, E2B_DOMAIN and NODE_EXTRA_CA_CERTS.
import { Sandbox } from '@e2b/code-interpreter'

const SERVER = 'python3 -m http.server 3000 --directory /workspace'

const box = await Sandbox.create()
const said = { text: (await box.runCode('6 * 7')).text, id: box.sandboxId }
const context = await box.createCodeContext()
await box.runCode("x = 'of the context'", { context })
said.context = (await box.runCode('x', { context })).text
await box.files.write('/workspace/index.html', 'page')
said.file = await box.files.read('/workspace/index.html')
said.command = (await box.commands.run('id -un')).stdout
await box.commands.run(SERVER, { background: true })
await box.commands.run('for n in $(seq 200); do curl -sf localhost:3000 && exit; sleep 0.05; done; exit 1')
said.host = box.getHost(3000)
said.page = await (await fetch(`https://${said.host}/`)).text()
said.killed = await box.kill()
console.log(JSON.stringify(said))
