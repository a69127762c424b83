"use strict";
// Keeps conversations in this browser (IndexedDB), within bounds: what is over them goes, the oldest first. A browser
// that lends no database, as in some private windows, keeps conversations until the page is left.

const MOST_CHATS = 200;
const MOST_BYTES = 128 * 2 ** 20;

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

class ChatStore {
  // `isKept`: whether conversations outlive the page.
  isKept = false;
  #database = null;
  #heads = new Map();
  #chats = new Map();
  // Tells the router's other pages in this browser that the list has changed.
  #channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("baton-chats");

  async open(onChange) {
    try {
      const opening = indexedDB.open("baton-chats", 1);
      opening.onupgradeneeded = () => {
        opening.result.createObjectStore("heads", {keyPath: "id"});
        opening.result.createObjectStore("chats", {keyPath: "id"});
      };
      this.#database = await done(opening);
      this.isKept = true;
      if (this.#channel) this.#channel.onmessage = onChange;
    } catch {
      this.#database = null;
    }
  }
  // `{id, title, updated, bytes}` of every conversation, the latest first.
  async heads() {
    const heads = this.#database ? await done(this.#store("heads").getAll()) : [...this.#heads.values()];
    return heads.sort((one, other) => other.updated - one.updated);
  }
  async load(id) {
    return this.#database ? done(this.#store("chats").get(id)) : this.#chats.get(id);
  }
  // Returns the number of other conversations that had to go. Throws if this one alone is too large.
  async save(chat) {
    const bytesOf = turn => JSON.stringify({...turn, files: []}).length + (turn.files || []).reduce((sum, file) => sum + file.url.length, 0);
    const head = {id: chat.id, title: chat.title, updated: chat.updated, bytes: chat.turns.reduce((sum, turn) => sum + bytesOf(turn), 0)};
    if (head.bytes > MOST_BYTES / 4) throw new Error("this conversation is too large to be kept");
    // It is written at once, since the page may be about to go; what is over the bounds is found afterwards.
    await this.#write((heads, chats) => {
      heads.put(head);
      chats.put(chat);
    });
    let bytes = head.bytes;
    const others = (await this.heads()).filter(one => one.id !== chat.id);
    const old = others.filter((one, place) => (bytes += one.bytes) > MOST_BYTES || place >= MOST_CHATS - 1);
    if (old.length) await this.#write((...stores) => stores.forEach(kept => old.forEach(one => kept.delete(one.id))));
    return old.length;
  }
  async remove(id) {
    await this.#write((...stores) => stores.forEach(store => store.delete(id)));
  }
  async clear() {
    await this.#write((...stores) => stores.forEach(store => store.clear()));
  }
  async #write(change) {
    if (!this.#database) {
      const withPut = map => ({put: one => map.set(one.id, structuredClone(one)), delete: id => map.delete(id), clear: () => map.clear()});
      return change(withPut(this.#heads), withPut(this.#chats));
    }
    const transaction = this.#database.transaction(["heads", "chats"], "readwrite");
    const ended = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    change(transaction.objectStore("heads"), transaction.objectStore("chats"));
    // Without this a page that goes takes its changes with it.
    transaction.commit();
    await ended;
    this.#channel?.postMessage("changed");
  }
  #store(name) {
    return this.#database.transaction(name).objectStore(name);
  }
}

// A name that no other conversation or request has; pages by plain HTTP have no crypto.randomUUID.
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map(byte => byte.toString(16).padStart(2, "0")).join("");
}
function asMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.settings.system) parts.push("## System", chat.settings.system);
  for (const turn of chat.turns) {
    parts.push(turn.role === "user" ? "## User" : `## ${turn.model || "Assistant"}`);
    for (const file of turn.files || []) parts.push(`*Attached: ${file.name}*`);
    if (turn.reasoning) parts.push("<details><summary>Reasoning</summary>\n\n" + turn.reasoning + "\n\n</details>");
    if (turn.text) parts.push(turn.text);
  }
  return parts.join("\n\n") + "\n";
}
function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], {type})), anchor = element("a");
  anchor.href = url;
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
