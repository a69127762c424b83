"use strict";
// The page itself: the conversation that is open, the list of all, and what a person does with them.

const byId = id => document.getElementById(id);
const store = new ChatStore();
const attachments = new Attachments(byId("attached"), byId("refused"));
const views = new Map();
let chat = emptyChat();
// One answer at a time; its AbortController.
let running = null;
let models = [];
let model = null;
let saveTimer = 0;
// The names of conversations that were deleted, which an answer that still ends must not bring back.
const forgotten = new Set();
let isLeaving = false;

function emptyChat() {
  return {id: newId(), title: "", updated: 0, model: "", settings: {}, turns: []};
}

// --- settings ---

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
function settingsOf() {
  const settings = {system: byId("system").value, stop_loops: byId("stop_loops").checked};
  for (const id of NUMBERS) if (byId(id).value.trim() !== "") settings[id] = Number(byId(id).value);
  return settings;
}
function showSettings(settings) {
  byId("system").value = settings.system ?? "";
  byId("stop_loops").checked = settings.stop_loops ?? true;
  for (const id of NUMBERS) byId(id).value = settings[id] ?? "";
}

// --- models ---

// Asks for a key because the router does not take the one that it got, which it may have taken before.
function askForKey(reason) {
  byId("settings").hidden = byId("key-part").hidden = false;
  byId("model").textContent = reason;
  byId("key").setAttribute("aria-invalid", "true");
  byId("key").focus();
  byId("key").select();
}
async function connect() {
  let failed = "", all = [], isKeyBad = false;
  try {
    all = await listModels();
  } catch (error) {
    isKeyBad = error.status === 401;
    failed = error instanceof Refused ? error.message : `the router can't be reached: ${error.message}`;
  }
  models = all.filter(one => one.capabilities.includes("generate"));
  if (!failed && !models.length) failed = whyNoChat(all[0]);
  showModels(failed);
  byId("key").setAttribute("aria-invalid", String(isKeyBad));
  if (isKeyBad) byId("settings").hidden = byId("key-part").hidden = false;
  return all;
}
function whyNoChat(card) {
  if (!card.capabilities.length) {
    setTimeout(connect, 3000);
    return `${card.id}: waiting for a node that is ready`;
  }
  const uses = {
    embed: "gives vectors (/v1/embeddings)", score: "compares texts (/v1/rerank, /v1/score)",
    classify: "sorts texts into classes (/classify)", transcribe: "writes down speech (/v1/audio/transcriptions)",
  };
  return `${card.id} does not chat: it ${card.capabilities.map(one => uses[one]).filter(Boolean).join(", ")}`;
}
function showModels(failed) {
  const choices = models.map(one => {
    const option = element("option", "", one.parent ? `${one.id} (adapter of ${one.parent})` : one.id);
    option.value = one.id;
    return option;
  });
  byId("models").replaceChildren(...choices);
  byId("models").hidden = models.length < 2;
  chooseModel(chat.model || model?.id, failed);
}
// The model of this name, or else the first one.
function chooseModel(name, failed = "") {
  model = models.find(one => one.id === name) || models[0] || null;
  byId("models").value = model?.id ?? "";
  const length = model && `${model.max_model_len} tokens`;
  byId("model").textContent = failed || (models.length > 1 ? length : `${model.id}, ${length}`);
  byId("model").classList.toggle("bad", Boolean(failed));
  const isPlain = Boolean(model && !model.has_chat_template);
  byId("note").hidden = !isPlain;
  byId("note").textContent = isPlain ? "This model has no chat template, so it continues text (/v1/completions): what you send is added to the text so far, and it goes on from there." : "";
  byId("system-name").textContent = isPlain ? "Text before all others" : "System prompt";
  byId("max_tokens").placeholder = isPlain ? "256" : "what fits";
  const own = model?.default_sampling_params ?? {};
  for (const id of ["temperature", "top_p"]) byId(id).placeholder = own[id] ?? 1;
  byId("attach").hidden = !imageLimits();
  byId("hint").textContent = imageLimits() ? ". Images are attached, pasted or dropped here." : "";
  byId("send").disabled = !model;
  if (!chat.turns.length) showHello();
}
const imageLimits = () => (model?.has_chat_template ? model.image_limits : null);

// --- the conversation ---

function showHello() {
  const hello = element("div", "hello faint");
  hello.append(element("b", "", model?.id ?? "Baton"), model && !model.has_chat_template ? "Write the beginning of a text." : "Ask something.");
  byId("turns").replaceChildren(hello);
}
function showTurn(turn) {
  const view = new TurnView(turn);
  views.set(turn, view);
  byId("turns").append(view.part);
  return view;
}
// Shows a conversation that is stored, or a new one.
function show(next) {
  running?.abort();
  running = null;
  views.clear();
  chat = next;
  byId("turns").replaceChildren();
  byId("spoken").replaceChildren();
  for (const turn of chat.turns) {
    if (turn.end === "running") turn.end = "interrupted";
    const view = showTurn(turn);
    if (turn.role === "assistant") view.finish(turn === chat.turns[chat.turns.length - 1]);
  }
  if (models.length) chooseModel(chat.model || model?.id);
  document.title = chat.title ? `${chat.title} · Baton` : "Baton chat";
  byId("log").scrollTop = byId("log").scrollHeight;
}
function addTurn(turn) {
  if (!chat.turns.length) byId("turns").replaceChildren();
  chat.turns.push(turn);
  return showTurn(turn);
}
// Follows the end of the conversation, unless its reader has scrolled away from it.
function following(change) {
  const log = byId("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}
function dropFrom(place) {
  for (const later of chat.turns.splice(place)) views.get(later).part.remove();
}
function send() {
  const text = byId("prompt").value;
  if (running || !model || !(text.trim() || attachments.files.length)) return;
  byId("prompt").value = "";
  fit();
  say({role: "user", text, files: attachments.take()});
}
function say(message) {
  if (!chat.turns.length) {
    chat.title = (message.text.trim().split("\n")[0] || message.files[0].name).slice(0, 60);
    document.title = `${chat.title} · Baton`;
    history.replaceState(null, "", "#" + chat.id);
  }
  addTurn(message);
  ask();
}
function ask() {
  const turn = {role: "assistant", text: "", model: model.id, plain: !model.has_chat_template};
  addTurn(turn);
  byId("log").scrollTop = byId("log").scrollHeight;
  generate(turn);
}
function retry(turn) {
  const place = chat.turns.indexOf(turn);
  if (running || !model || place < 0) return;
  dropFrom(place);
  ask();
}
function continueAnswer(turn) {
  if (!running && model && turn === chat.turns[chat.turns.length - 1]) generate(turn, true);
}
function replaceMessage(turn, text) {
  const place = chat.turns.indexOf(turn);
  if (running || !model || place < 0) return;
  dropFrom(place);
  say({role: "user", text, files: turn.files || []});
}

// --- an answer ---

function speed(run) {
  const told = [];
  if (run.tokens) told.push(`${run.tokens} token${run.tokens === 1 ? "" : "s"}`);
  if (run.tokens > 1 && run.last > run.first) told.push(`${((run.tokens - 1) * 1000 / (run.last - run.first)).toFixed(1)} tokens/s`);
  if (run.first) told.push(`first after ${Math.round(run.first - run.begun)} ms`);
  if (run.seed) told.push(`seed ${run.seed}`);
  return told.join(", ");
}
// Adds what one event has to the answer; returns whether it had any text.
function take(told, turn, run) {
  if (told.usage) run.tokens = told.usage.completion_tokens;
  const choice = told.choices[0];
  if (!choice) return false;
  const delta = choice.delta ?? {content: choice.text};
  if (delta.content) turn.text += delta.content;
  if (delta.reasoning_content) turn.reasoning = (turn.reasoning || "") + delta.reasoning_content;
  for (const call of delta.tool_calls || []) {
    const calls = turn.calls ||= [], known = calls[call.index] ||= {name: "", arguments: ""};
    known.name += call.function?.name || "";
    known.arguments += call.function?.arguments || "";
  }
  if (choice.finish_reason) turn.end = choice.finish_reason;
  return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
}
async function generate(turn, goesOn = false) {
  const own = chat, view = views.get(turn), abort = running = new AbortController();
  const run = {begun: performance.now(), first: 0, last: 0, tokens: 0, seed: ""};
  own.settings = settingsOf();
  own.model = model.id;
  const [path, body] = requestFor(own, model, goesOn);
  Object.assign(turn, {end: "running", error: "", stats: ""});
  view.error?.remove();
  byId("spoken").replaceChildren();
  showRunning(view, true);
  keep(own);
  let scheduled = 0, cost = 0;
  // A block that takes long to draw is drawn less often, so that drawing takes a third of the time at most.
  const draw = () => following(() => {
    const begun = performance.now();
    scheduled = 0;
    turn.stats = speed(run);
    view.draw();
    cost = performance.now() - begun;
  });
  try {
    for await (const told of streamed(path, body, abort.signal, got => { run.seed = got.get("baton-seed") || ""; })) {
      if (take(told, turn, run)) {
        run.last = performance.now();
        run.first ||= run.last;
        run.tokens += 1;
        keepSoon(own);
        if (own.settings.stop_loops && isLooping(turn.text)) {
          turn.end = "loop";
          break;
        }
      }
      scheduled ||= setTimeout(draw, Math.max(16, 2 * cost));
    }
  } catch (error) {
    if (isLeaving) turn.end = "interrupted";
    else if (abort.signal.aborted) turn.end = "stopped";
    else fail(turn, error);
  } finally {
    abort.abort();
    clearTimeout(scheduled);
    if (running === abort) running = null;
    turn.stats = speed(run);
    if (turn.end === "running") turn.end = "stop";
    following(() => view.finish(turn === own.turns[own.turns.length - 1]));
    if (own === chat) view.speakRest();
    showRunning(view, running !== null);
    await keep(own);
  }
}
function fail(turn, error) {
  turn.end = "failed";
  turn.error = error instanceof Refused ? error.message : `the router can't be reached: ${error.message}`;
  if (error.status !== 401) return;
  turn.error += ". Type in a key that is valid, then choose Try again.";
  askForKey(turn.error);
}
function showRunning(view, isRunning) {
  view.part.classList.toggle("pending", isRunning);
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
}

// --- the conversations that are kept ---

// Saves a conversation while it grows, every two seconds.
function keepSoon(own) {
  saveTimer ||= setTimeout(() => keep(own), 2000);
}
async function keep(own) {
  clearTimeout(saveTimer);
  saveTimer = 0;
  if (forgotten.has(own.id)) return;
  own.updated = Date.now();
  try {
    const gone = await store.save(own);
    byId("kept").textContent = gone ? `The oldest ${gone === 1 ? "conversation was" : `${gone} conversations were`} dropped to make room.` : keptWhere();
  } catch (error) {
    byId("kept").textContent = `Not kept: ${error.message}`;
  }
  await showList();
}
const keptWhere = () => (store.isKept ? "Kept in this browser alone." : "This browser keeps nothing: reloading forgets all.");
async function showList() {
  const heads = await store.heads();
  byId("chats").replaceChildren(...heads.map(head => {
    const item = element("li"), anchor = item.appendChild(element("a", "", head.title));
    anchor.href = "#" + head.id;
    anchor.title = `${head.title}\n${new Date(head.updated).toLocaleString()}`;
    if (head.id === chat.id) anchor.setAttribute("aria-current", "true");
    item.append(sureButton("×", `Delete ${head.title}`, "Delete?", () => forget(head.id)));
    return item;
  }));
  byId("clear").hidden = !heads.length;
  byId("export").hidden = !chat.turns.length;
}
// A button that does its work when it is pressed a second time.
function sureButton(text, title, question, work) {
  const made = button(text, title, () => {
    if (made.textContent === question) return work();
    made.textContent = question;
    setTimeout(() => { made.textContent = text; }, 4000);
  });
  made.setAttribute("aria-label", title);
  return made;
}
async function forget(id) {
  forgotten.add(id);
  await store.remove(id);
  if (id === chat.id) newChat();
  await showList();
}
async function forgetAll() {
  forgotten.add(chat.id);
  await store.clear();
  newChat();
  await showList();
}
function newChat() {
  history.pushState(null, "", location.pathname);
  show(emptyChat());
  byId("prompt").focus();
  showList();
}
// Opens the conversation that the address names.
async function openNamed() {
  const id = location.hash.slice(1);
  if (id === chat.id) return;
  const found = id ? await store.load(id) : null;
  show(found || emptyChat());
  if (found) showSettings(found.settings);
  else if (id) history.replaceState(null, "", location.pathname);
  if (isNarrow.matches) byId("history").hidden = true;
  await showList();
}

// --- what a person does ---

function fit() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = prompt.scrollHeight + "px";
}
async function attach(files) {
  await attachments.add(files, imageLimits(), chat.turns.flatMap(turn => turn.files || []));
  byId("prompt").focus();
}
function toggle(id, other) {
  byId(id).hidden = !byId(id).hidden;
  if (isNarrow.matches) byId(other).hidden = true;
}
const isNarrow = matchMedia("(max-width: 900px)");
const hasFiles = event => event.dataTransfer?.types.includes("Files");

byId("fields").onsubmit = event => event.preventDefault();
byId("fields").onchange = () => {
  chat.settings = settingsOf();
  if (chat.turns.length && !running) keep(chat);
};
byId("composer").onsubmit = event => { event.preventDefault(); send(); };
byId("prompt").oninput = fit;
byId("prompt").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
document.onkeydown = event => { if (event.key === "Escape") running?.abort(); };
byId("stop").onclick = () => running?.abort();
byId("new").onclick = newChat;
byId("models").onchange = () => chooseModel(byId("models").value);
byId("attach").onclick = () => byId("files").click();
byId("files").onchange = async () => {
  await attach([...byId("files").files]);
  byId("files").value = "";
};
document.onpaste = event => {
  const files = [...event.clipboardData.files];
  if (files.length) { event.preventDefault(); attach(files); }
};
document.ondragover = event => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("dropping");
};
document.ondragleave = event => { if (!event.relatedTarget) document.body.classList.remove("dropping"); };
document.ondrop = event => {
  document.body.classList.remove("dropping");
  if (!hasFiles(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
};
byId("toggle").onclick = () => toggle("settings", "history");
byId("toggle-history").onclick = () => toggle("history", "settings");
byId("settings").hidden = byId("history").hidden = isNarrow.matches;
byId("clear").replaceWith(Object.assign(sureButton("Delete all", "Delete all conversations", "Really all?", forgetAll), {id: "clear"}));
byId("export-markdown").onclick = () => download("chat.md", "text/markdown", asMarkdown(chat));
byId("export-json").onclick = () => download("chat.json", "application/json", JSON.stringify(chat, null, 2));
byId("key").value = sessionStorage.getItem("baton-key") || "";
byId("key-part").hidden = !byId("key").value;
byId("key").onchange = () => { sessionStorage.setItem("baton-key", byId("key").value.trim()); connect(); };
window.onhashchange = openNamed;
window.onpagehide = () => { isLeaving = true; if (running) keep(chat); };
window.onpageshow = () => { isLeaving = false; };
store.open(showList).then(async () => {
  byId("kept").textContent = keptWhere();
  await openNamed();
  await Promise.all([connect(), showList()]);
  byId("prompt").focus();
});
