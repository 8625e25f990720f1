// Takes a list of requests on stdin, runs each with `client.responses.stream()`, and prints a line of JSON for each:
// the response, or the error that the client raised.
import { text } from 'node:stream/consumers'
import OpenAI from 'openai'

const client = new OpenAI({ maxRetries: 0 })

async function outcome(request) {
  const counts = {}
  let response = null
  try {
    for await (const event of client.responses.stream(request)) {
      counts[event.type] = (counts[event.type] ?? 0) + 1
      response = event.response ?? response
    }
    return { response, counts, error: null }
  } catch (error) {
    const kind = error instanceof OpenAI.APIError ? 'APIError' : error.constructor.name
    return { response, counts, error: `${kind}: ${error.message}` }
  }
}

for (const request of JSON.parse(await text(process.stdin))) {
  console.log(JSON.stringify(await outcome(request)))
}
