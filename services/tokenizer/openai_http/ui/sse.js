// Server-sent events of a fetched body. Comments (keep-alives) are dropped, as are event names.

/** The data of each event, as text. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return; // an event that no empty line ended is none
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const each of lines) {
        const line = each.endsWith("\r") ? each.slice(0, -1) : each;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops listening also hangs up
  }
}
