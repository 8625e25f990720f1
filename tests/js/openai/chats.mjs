// Takes a list of requests on stdin, runs each with `client.chat.completions.stream()`, and prints a line of JSON for
// each: the choice that the client has put together, or the error that it raised.
import { text } from 'node:stream/consumers'
import OpenAI from 'openai'

const client = new OpenAI({ maxRetries: 0 })

async function outcome(request) {
  try {
    const completion = await client.chat.completions.stream(request).finalChatCompletion()
    return { choice: completion.choices[0], error: null }
  } catch (error) {
    return { choice: null, error: `${error.constructor.name}: ${error.message}` }
  }
}

for (const request of JSON.parse(await text(process.stdin))) {
  console.log(JSON.stringify(await outcome(request)))
}
