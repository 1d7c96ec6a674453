// Which tokens a piece of the answer's text was made of.
//
// Tokens come with bytes, text in pieces, and the two are cut differently: a character may span
// tokens, text is held back where a stop string or a tool call could begin, and tags of thoughts and
// calls are tokens without text. So tokens wait in a queue until their text comes; what does not fit
// is shown without tokens, never late and never wrong.

const LOOK_AHEAD = 32;

export class Aligner {
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #partial = []; // tokens whose bytes do not end a character yet
  #queue = []; // {text, rows}

  /** Take logprobs rows, {token, logprob, bytes, top_logprobs} each. */
  add(rows) {
    for (const row of rows) {
      if (row.bytes === null) {
        this.#queue.push({ text: row.token, rows: [row] });
        continue;
      }
      if (row.bytes.length === 0) continue; // a special token without text
      this.#partial.push(row);
      const text = this.#decoder.decode(new Uint8Array(row.bytes), { stream: true });
      if (text === "") continue;
      this.#queue.push({ text, rows: this.#partial });
      this.#partial = [];
    }
  }

  /** The next text of the answer as parts, {text, rows} each; rows is null where unknown. */
  take(text) {
    const parts = [];
    while (text !== "") {
      const part = this.#next(text);
      parts.push(part);
      text = text.slice(part.text.length);
    }
    return parts;
  }

  #next(text) {
    const ahead = this.#queue.slice(0, LOOK_AHEAD);
    const at = ahead.findIndex((each) => fits(text, each.text));
    if (at >= 0) {
      const { text: whole, rows } = ahead[at];
      this.#queue.splice(0, at + 1);
      return { text: text.startsWith(whole) ? whole : whole.trim(), rows };
    }
    const cut = ahead.findIndex((each) => each.text.startsWith(text));
    if (cut >= 0) {
      this.#queue.splice(0, cut);
      const first = this.#queue[0];
      this.#queue[0] = { text: first.text.slice(text.length), rows: first.rows };
      return { text, rows: first.rows };
    }
    return { text, rows: null };
  }
}

// Around thoughts and calls the white space of a token may be left out.
function fits(text, token) {
  if (token === "") return false;
  const bare = token.trim();
  return text.startsWith(token) || (bare !== "" && text.startsWith(bare));
}
