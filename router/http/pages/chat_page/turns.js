"use strict";
// How the messages of a conversation look, and what can be done with each of them.

const ENDS = {
  length: "ended at max tokens", stopped: "stopped", loop: "stopped because it only repeats itself (see Settings)",
  interrupted: "interrupted when the page was left", failed: "",
};
const CONTINUED = ["length", "stopped", "interrupted", "failed"];

class TurnView {
  // `turn`: `{role, text, files, reasoning, calls, stats, end, error, plain, model}`, as it is stored.
  constructor(turn) {
    this.turn = turn;
    this.part = element("article", "turn " + turn.role);
    this.part.setAttribute("aria-label", turn.role === "user" ? "Your message" : "Answer");
    this.text = element("div", "text");
    this.under = element("div", "under faint");
    this.part.append(this.text, this.under);
    // An answer is read aloud block by block, not again with every token.
    this.markdown = new GrowingMarkdown(this.text, node => running && byId("spoken").append(element("p", "", node.textContent)));
    if (turn.role === "user") this.drawUser();
    else this.draw();
  }
  drawUser() {
    const {turn} = this;
    this.text.textContent = turn.text;
    this.text.hidden = !turn.text;
    if (turn.files?.length) {
      const files = element("div", "files");
      files.append(...turn.files.map(thumbnail));
      this.text.before(files);
    }
    this.under.append(button("Edit", "Change this message; what follows it is dropped", () => this.edit()), copyButton(() => turn.text, "Copy the message"));
  }
  // Draws an answer as far as it has come.
  draw() {
    const {turn} = this;
    if (turn.reasoning) this.drawReasoning();
    if (turn.plain) {
      const shown = this.text.firstChild || this.text.appendChild(element("p"));
      shown.textContent = turn.text;
    } else this.markdown.draw(turn.text);
    if (turn.calls) this.drawCalls();
    this.under.replaceChildren(element("span", "", [turn.stats, ENDS[turn.end]].filter(Boolean).join(", ")));
  }
  drawReasoning() {
    if (!this.reasoning) {
      this.reasoning = element("details", "reasoning");
      this.reasoning.append(element("summary"), element("div", "faint"));
      this.text.before(this.reasoning);
    }
    const isThinking = this.turn.end === "running" && !this.turn.text;
    this.reasoning.firstChild.textContent = isThinking ? "Thinking …" : "Reasoning";
    this.reasoning.lastChild.textContent = this.turn.reasoning.trim();
  }
  drawCalls() {
    this.calls?.remove();
    this.calls = element("div", "calls");
    for (const call of this.turn.calls) {
      let given = call.arguments;
      try {
        given = JSON.stringify(JSON.parse(given), null, 2);
      } catch {
        // The arguments are not complete yet.
      }
      this.calls.append(drawnFence({name: `calls ${call.name}`, text: given}));
    }
    this.text.after(this.calls);
  }
  // The end of an answer: its error, and the buttons. `isLast`: nothing follows it.
  finish(isLast) {
    const {turn} = this;
    this.draw();
    this.error?.remove();
    if (turn.error) {
      this.error = element("div", "error", turn.error);
      this.error.setAttribute("role", "alert");
      this.under.before(this.error);
    }
    if (turn.text) this.under.append(copyButton(() => turn.text, "Copy the answer as Markdown"));
    this.under.append(button(turn.error ? "Try again" : "Again", "Ask for another answer; this one and what follows is dropped", () => retry(turn)));
    if (isLast && turn.text && CONTINUED.includes(turn.end)) this.under.append(button("Continue", "Let this answer go on", () => continueAnswer(turn)));
  }
  // Lets a screen reader read what has not been read as a finished block.
  speakRest() {
    const rest = [...this.text.childNodes].slice(this.markdown.numFinalNodes);
    byId("spoken").append(...rest.map(node => element("p", "", node.textContent)));
  }
  edit() {
    if (running) return;
    const form = element("form", "edit"), area = element("textarea"), row = element("div", "under");
    area.value = this.turn.text;
    area.setAttribute("aria-label", "Edited message");
    const close = () => {
      form.remove();
      this.part.classList.remove("editing");
    };
    const save = element("button", "main", "Send");
    row.append(save, button("Cancel", "Leave the message as it was", close, ""), element("span", "faint", "Sending drops what follows this message."));
    form.append(area, row);
    form.onsubmit = event => {
      event.preventDefault();
      if (area.value.trim() || this.turn.files?.length) replaceMessage(this.turn, area.value);
    };
    area.onkeydown = event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
      else if (event.key === "Escape") close();
    };
    this.part.classList.add("editing");
    this.part.append(form);
    area.style.height = Math.min(area.scrollHeight + 4, innerHeight / 2) + "px";
    area.focus();
  }
}
