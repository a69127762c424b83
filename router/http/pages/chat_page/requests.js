"use strict";
// What the page asks of its router: the models, and answers as streams.

const MOST_RESUMPTIONS = 5;

function headers(more = {}) {
  const key = byId("key").value.trim();
  return {"content-type": "application/json", ...(key ? {authorization: "Bearer " + key} : {}), ...more};
}

// A request that the router refused, or a stream that it ended with an error.
class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}
async function refusal(answer) {
  const text = await answer.text();
  let message = `${answer.status} ${answer.statusText} ${text.slice(0, 500)}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // A proxy before the router may answer with a page of its own.
  }
  const wait = answer.headers.get("retry-after");
  return new Refused(wait && [429, 503].includes(answer.status) ? `${message} (try again in ${wait} s)` : message, answer.status);
}
async function listModels() {
  const answer = await fetch("v1/models", {headers: headers(), credentials: "same-origin"});
  if (!answer.ok) throw await refusal(answer);
  return (await answer.json()).data;
}

// The events of one response, `{id, data}` each.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  for (;;) {
    const {value, done: isOver} = await reader.read();
    if (isOver) return;
    const parts = (unread + value).split("\n\n");
    unread = parts.pop();
    for (const part of parts) {
      const fields = new Map(part.split("\n").map(line => line.split(/: (.*)/s)));
      if (fields.has("data")) yield {id: fields.get("id") || "", data: fields.get("data")};
    }
  }
}
// The answer's events as objects. After a lost connection the stream is continued where it was: see docs/http.md.
// `onHeaders` gets the headers of the first response.
async function* streamed(path, body, signal, onHeaders) {
  const sent = {method: "POST", body: JSON.stringify(body), signal, credentials: "same-origin"};
  const requestId = "chat-" + newId();
  for (let lastId = "", tries = 0; ; tries += 1) {
    try {
      const answer = await fetch(path, {...sent, headers: headers({"x-request-id": requestId, ...(lastId && {"last-event-id": lastId})})});
      if (!answer.ok) throw await refusal(answer);
      if (!lastId) onHeaders(answer.headers);
      for await (const event of events(answer)) {
        if (event.data === "[DONE]") return;
        const told = JSON.parse(event.data);
        if (told.error) throw new Refused(told.error.message);
        lastId = event.id || lastId;
        yield told;
      }
      throw new Error("the connection ended in mid-answer");
    } catch (error) {
      if (error instanceof Refused || signal.aborted || !lastId || tries >= MOST_RESUMPTIONS) throw error;
      await new Promise(resolve => setTimeout(resolve, 500 * 2 ** tries));
      if (signal.aborted) throw error;
    }
  }
}

// Whether a text ends in a loop: see baton/text/repetition.py, which has the same rule.
function isLooping(text) {
  for (let size = 1; size <= Math.min(512, text.length / 6); size++) {
    const span = Math.max(6 * size, 512), end = text.length;
    if (end >= span && text[end - 1] === text[end - 1 - size] && text.slice(end - span + size) === text.slice(end - span, end - size)) return true;
  }
  return false;
}

const contentOf = turn => (turn.files?.length
  ? [...turn.files.map(file => ({type: "image_url", image_url: {url: file.url}})), ...(turn.text ? [{type: "text", text: turn.text}] : [])]
  : turn.text);
const partsOf = content => (typeof content === "string" ? [{type: "text", text: content}] : content);
// The messages of a chat. Many templates demand that roles alternate, and an answer may be missing: it failed or was
// stopped; so messages of one role in a row become one.
function messagesOf(turns, system) {
  const messages = [];
  for (const turn of turns) {
    const before = messages[messages.length - 1], content = contentOf(turn);
    if (!before || before.role !== turn.role) messages.push({role: turn.role, content});
    else if (typeof before.content === "string" && typeof content === "string") before.content += "\n\n" + content;
    else before.content = [...partsOf(before.content), ...partsOf(content)];
  }
  return system.trim() ? [{role: "system", content: system}, ...messages] : messages;
}
// The path and the body by which a conversation goes on. `goesOn`: with its last answer, instead of a new one.
function requestFor(chat, model, goesOn) {
  const {system, stop_loops: _, ...sampling} = chat.settings;
  const fields = {model: model.id, stream: true, stream_options: {include_usage: true}, ...sampling};
  const said = chat.turns.filter(turn => turn.text || turn.files?.length);
  if (!model.has_chat_template) {
    return ["v1/completions", {...fields, max_tokens: fields.max_tokens ?? 256, prompt: system + said.map(turn => turn.text).join("")}];
  }
  const more = goesOn ? {continue_final_message: true, add_generation_prompt: false} : {};
  return ["v1/chat/completions", {...fields, ...more, messages: messagesOf(said, system)}];
}
