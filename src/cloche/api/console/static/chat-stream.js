// The events of an answer, as the gateway streams them.

const LONGEST = 64 * 1024 * 1024; // characters of one event: pictures are in them

/** Each event of a Response whose body is a stream of server-sent events. Throws Error where it breaks off. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = [];
  let held = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pieces.push(value);
    held += value.length;
    if (held > LONGEST) throw new Error("the answer is too large to be shown");
    if (!value.includes("\n")) continue; // a long line is looked at once, when all of it is there
    const frames = pieces.join("").split("\n\n");
    pieces = [frames.pop()];
    held = pieces[0].length;
    for (const frame of frames) yield* eventIn(frame);
  }
}

function* eventIn(frame) {
  const data = frame.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
  if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
}
