// The engine's API, as far as the page needs it. Paths are relative, so it works behind a prefix.

import { events } from "./sse.js";

/** An answer that was refused or broke off. `param`: the field of the request that is wrong. */
export class ApiError extends Error {
  constructor(message, { title = "The answer broke off", param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { title, param, code });
  }
}

/** The first model's card, or null while there is none. */
export async function servedModel() {
  const answer = await fetch("v1/models");
  return answer.ok ? ((await answer.json()).data[0] ?? null) : null;
}

/** The chunks of a streamed chat. Throws ApiError, or AbortError when `signal` fires. */
export async function* chat(request, signal) {
  const answer = await post(request, signal);
  let whole = false;
  try {
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") {
        whole = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw refused(chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost.");
  }
  if (!whole) throw new ApiError("The stream ended before the answer did.");
}

async function post(request, signal) {
  let answer;
  try {
    answer = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("Nothing answers at this address.", { title: "The engine cannot be reached" });
  }
  if (answer.ok) return answer;
  const error = await answer.json().then((body) => body.error).catch(() => undefined);
  const wait = answer.headers.get("retry-after");
  const said = error ?? { message: `The answer was HTTP ${answer.status}.` };
  throw refused(said, wait ? ` Try again in ${wait} s.` : "", "The engine refused this");
}

function refused({ message, param, code }, more = "", title = undefined) {
  return new ApiError(message + more, { title, param, code });
}
