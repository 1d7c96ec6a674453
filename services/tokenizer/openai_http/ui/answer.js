// One answer of the model: its thought, text and calls as they come, and how it ended.

import { Aligner } from "./align.js";
import { makeReachable, partNodes } from "./alternatives.js";
import { make } from "./dom.js";

const ENDS = { length: "cut at the token limit", content_filter: "filtered", stopped: "stopped" };

export class Answer {
  text = "";
  thought = "";
  calls = [];
  #began = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;
  #usage = null;
  #end = null;
  #aligner = new Aligner();
  #onResults;
  #thoughtText = make("div", { class: "tokens" });
  #thoughtTitle = make("summary", {}, "Thinking");
  #thoughtBox = make("details", { class: "thought", hidden: true }, this.#thoughtTitle, this.#thoughtText);
  #body = make("div", { class: "tokens" });
  #callBox = make("div", { class: "calls" });
  #problem = make("div", { class: "problem", role: "alert", hidden: true });
  #figures = make("span");
  #copy = button("Copy", () => navigator.clipboard.writeText(this.text));
  #foot = make("footer", { hidden: true }, this.#figures);

  /** `onRetry` asks again; `onResults` takes {id: text} of the calls. */
  constructor({ onRetry, onResults }) {
    this.#onResults = onResults;
    this.element = make("article", { class: "turn assistant", "aria-label": "Answer", "aria-busy": "true" },
      this.#thoughtBox, this.#body, this.#callBox, this.#problem, this.#foot);
    const again = button("Try again", onRetry);
    again.classList.add("retry");
    this.#foot.append(this.#copy, again);
  }

  /** Whether the model said nothing at all. */
  get empty() {
    return this.text === "" && this.thought === "" && this.calls.length === 0;
  }

  /** The next chunk of the stream. */
  add({ choices: [choice], usage }) {
    if (usage) this.#usage = usage;
    if (!choice) return;
    const { delta, logprobs, finish_reason: end } = choice;
    if (logprobs) {
      this.#aligner.add(logprobs.content);
      this.#tokens += logprobs.content.length;
    }
    const thought = delta.reasoning_content ?? "";
    const text = delta.content ?? "";
    if (thought || text || delta.tool_calls) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    if (thought) this.#think(thought);
    if (text) {
      this.text += text;
      this.#body.append(...this.#aligner.take(text).flatMap(partNodes));
    }
    for (const each of delta.tool_calls ?? []) this.#call(each);
    if (end) this.#end = end;
  }

  /** The end of the stream, whichever it was. */
  finish(end = null) {
    this.#end = end ?? this.#end;
    this.element.setAttribute("aria-busy", "false");
    if (this.thought) this.#thoughtTitle.textContent = "Thought";
    makeReachable(this.#body);
    makeReachable(this.#thoughtText);
    this.#finishCalls();
    this.#figures.textContent = this.#summary();
    this.#copy.hidden = this.text === "" || !navigator.clipboard; // there is none over plain HTTP
    this.#foot.hidden = false;
  }

  /** Show why there is no (whole) answer. */
  fail(error) {
    const title = make("strong", {}, error.title ?? "Something went wrong");
    this.#problem.replaceChildren(title, make("p", {}, error.message));
    if (error.code) this.#problem.append(make("code", {}, error.code));
    this.#problem.hidden = false;
  }

  /** As the API takes it back. */
  message() {
    const message = { role: "assistant", content: this.text || (this.calls.length ? null : "") };
    if (this.thought) message.reasoning_content = this.thought;
    if (this.calls.length) {
      message.tool_calls = this.calls.map(({ id, name, given }) => ({
        id, type: "function", function: { name, arguments: given },
      }));
    }
    return message;
  }

  #think(text) {
    this.thought += text;
    this.#thoughtBox.hidden = false;
    this.#thoughtText.append(...this.#aligner.take(text).flatMap(partNodes));
  }

  #call({ index, id, function: piece }) {
    const call = (this.calls[index] ??= newCall(this.#callBox));
    if (id) call.id = id;
    if (piece.name) call.title.textContent = call.name = piece.name;
    call.given += piece.arguments ?? "";
    call.shown.textContent = call.given;
  }

  #finishCalls() {
    for (const call of this.calls) {
      try {
        call.shown.textContent = JSON.stringify(JSON.parse(call.given), null, 2);
      } catch {
        // cut in the middle: shown as it came
      }
    }
    if (this.calls.length && !["stopped", "failed"].includes(this.#end)) this.#askResults();
  }

  #askResults() {
    const fields = this.calls.map((call) => {
      const field = make("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: "Result" });
      call.card.append(field);
      return field;
    });
    const send = button("Send results", () => {
      for (const field of fields) field.readOnly = true;
      send.remove();
      this.#onResults(Object.fromEntries(fields.map((field, at) => [this.calls[at].id, field.value])));
    });
    this.#callBox.append(send);
  }

  #summary() {
    const said = [];
    const tokens = this.#usage?.completion_tokens ?? this.#tokens;
    const seconds = (this.#last - this.#first) / 1000;
    if (tokens) said.push(`${tokens} token${tokens === 1 ? "" : "s"}`);
    if (tokens > 1 && seconds > 0) said.push(`${((tokens - 1) / seconds).toFixed(1)}/s`);
    if (this.#first !== null) said.push(`first after ${((this.#first - this.#began) / 1000).toFixed(2)} s`);
    if (this.#usage) {
      const { prompt_tokens: prompt, prompt_tokens_details: details } = this.#usage;
      const cached = details?.cached_tokens ?? 0;
      said.push(`prompt ${prompt}${cached ? ` (${cached} from the cache)` : ""}`);
    }
    if (ENDS[this.#end]) said.push(ENDS[this.#end]);
    return said.join(" · ");
  }
}

function newCall(box) {
  const title = make("strong");
  const shown = make("pre");
  const card = make("section", { class: "call" }, make("h3", {}, "Calls ", title), shown);
  box.append(card);
  return { id: "", name: "", given: "", title, shown, card };
}

function button(text, onClick) {
  const made = make("button", { type: "button", class: "quiet" }, text);
  made.addEventListener("click", onClick);
  return made;
}
