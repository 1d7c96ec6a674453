// The conversation: what was said, what is asked next, and the keys and buttons that steer it.

import { hide, watchTokens } from "./alternatives.js";
import { Answer } from "./answer.js";
import { chat, servedModel } from "./api.js";
import { announce, byId, make } from "./dom.js";
import { startPanel } from "./engine_panel.js";
import { WrongSetting, markWrong, requestFields, startSettings, systemPrompt } from "./settings.js";

const EXAMPLES = [
  "Name three colours of the evening sky.",
  "Explain a cache to a child.",
  "Write a haiku about a train.",
];
const NEAR = 80; // pixels from the end that still count as the end

const log = byId("log");
const prompt = byId("prompt");
const narrow = window.matchMedia("(max-width: 60rem)");
let turns = []; // {said: [messages], element} or {answer}
let running = null; // the AbortController of the answer that comes

function messages() {
  const system = systemPrompt();
  const list = system ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, at) => {
    if (turn.answer) {
      if (!turn.answer.empty) list.push(turn.answer.message());
    } else if (!unanswered(at)) {
      list.push(...turn.said);
    }
  });
  return list;
}

// What got no answer is not sent again with the next message: templates want turns to alternate.
function unanswered(at) {
  const next = turns[at + 1]?.answer;
  return next !== undefined && next.empty;
}

function say(said, shown) {
  byId("welcome").hidden = true;
  const element = make("article", { class: "turn user", "aria-label": "You" }, make("p", {}, shown));
  turns.push({ said, element });
  log.append(element);
  ask();
}

async function ask() {
  const asked = messages();
  const answer = new Answer({ onRetry: retry, onResults: giveResults });
  log.append(answer.element);
  log.scrollTop = log.scrollHeight;
  const stop = new AbortController();
  turns.push({ answer });
  run(stop);
  let end = null;
  try {
    const fields = { messages: asked, stream: true, stream_options: { include_usage: true }, ...requestFields() };
    for await (const chunk of chat(fields, stop.signal)) {
      const follow = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
      answer.add(chunk);
      if (follow) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    end = stop.signal.aborted ? "stopped" : "failed";
    if (!stop.signal.aborted) {
      answer.fail(error instanceof WrongSetting ? { title: "A setting is wrong", message: error.message } : error);
      markWrong(error.field ?? error.param);
      if (!error.title && !(error instanceof WrongSetting)) throw error; // a fault of the page itself
    }
  } finally {
    if (running === stop) run(null);
    answer.finish(end);
    if (answer.element.isConnected) {
      announce(stop.signal.aborted ? "Stopped." : answer.text && `The answer: ${answer.text}`);
      log.scrollTop = log.scrollHeight;
    }
  }
}

function run(controller) {
  const stopHadFocus = document.activeElement === byId("stop");
  running = controller;
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
  if (controller) announce("Answering.");
  else if (stopHadFocus) prompt.focus();
}

function retry() {
  if (running) return;
  turns.pop().answer.element.remove();
  prompt.focus();
  ask();
}

function giveResults(results) {
  if (running) return;
  const said = Object.entries(results).map(([id, content]) => ({ role: "tool", tool_call_id: id, content }));
  say(said, said.map((each) => each.content).join("\n"));
}

function send() {
  const text = prompt.value.trim();
  if (running || text === "") return;
  prompt.value = "";
  fit();
  say([{ role: "user", content: text }], text);
}

function newChat() {
  running?.abort();
  run(null);
  for (const turn of turns) (turn.element ?? turn.answer.element).remove();
  turns = [];
  hide();
  byId("welcome").hidden = false;
  announce("A new chat.");
  prompt.focus();
}

// As high as its text, up to what the style sheet allows.
function fit() {
  prompt.style.setProperty("height", "auto");
  prompt.style.setProperty("height", `${prompt.scrollHeight + 2}px`);
}

function openPanel(open) {
  const button = byId("open-panel");
  document.body.classList.toggle("panel-open", open);
  button.setAttribute("aria-expanded", String(open));
  for (const each of document.querySelectorAll("main, header")) each.inert = open;
  (open ? byId("close-panel") : button).focus();
}

function onKey(event) {
  if (event.key !== "Escape" || event.isComposing) return;
  if (hide()) return;
  if (document.body.classList.contains("panel-open")) openPanel(false);
  else running?.abort();
}

async function showModel() {
  const model = await servedModel().catch(() => null);
  if (model === null) {
    setTimeout(showModel, 2000);
    return;
  }
  byId("model").textContent = model.id;
  byId("model").title = `${model.id}, ${model.max_model_len} tokens of context`;
}

startSettings();
startPanel();
watchTokens(log);
showModel();
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", newChat);
byId("open-panel").addEventListener("click", () => openPanel(true));
byId("close-panel").addEventListener("click", () => openPanel(false));
narrow.addEventListener("change", () => document.body.classList.contains("panel-open") && openPanel(false));
document.addEventListener("keydown", onKey);
for (const text of EXAMPLES) {
  const button = make("button", { type: "button", class: "quiet" }, text);
  button.addEventListener("click", () => say([{ role: "user", content: text }], text));
  byId("examples").append(button);
}
if (window.matchMedia("(hover: hover)").matches) prompt.focus();
