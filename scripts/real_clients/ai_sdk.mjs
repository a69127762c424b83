// Vercel's AI SDK: generateText, streamText and a structured answer with the provider for OpenAI-compatible servers,
// generateText with OpenAI's own provider (responses) and with Anthropic's (messages), a tool's round with each.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const { BATON_URL: url, BATON_MODEL: name } = process.env;
const prompt = "What is the capital of France?";
const compatible = createOpenAICompatible({
  name: "baton",
  baseURL: `${url}/v1`,
  apiKey: "any",
  supportsStructuredOutputs: true,
});
const asked = { model: compatible(name), prompt, maxOutputTokens: 40, temperature: 0, maxRetries: 0 };

const whole = await generateText(asked);
let streamed = "";
for await (const piece of streamText(asked).textStream) streamed += piece;
assert.equal(streamed, whole.text);
assert.ok(whole.usage.outputTokens > 0);
console.log("works: generateText and streamText, equal");

const schema = z.object({ name: z.string(), country: z.string() });
const city = await generateText({ ...asked, maxOutputTokens: 80, output: Output.object({ schema }) });
assert.equal(typeof city.output.name, "string");
console.log("works: a structured answer (Output.object)");

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "any" });
assert.ok((await generateText({ ...asked, model: openai(name) })).text);
console.log("works: OpenAI's provider (responses)");

const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" });
assert.ok((await generateText({ ...asked, model: anthropic(name) })).text);
console.log("works: Anthropic's provider (messages)");

const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}, 21 degrees`,
});
const providers = { "a compatible server": compatible(name), responses: openai(name), messages: anthropic(name) };
for (const [api, model] of Object.entries(providers)) {
  const round = {
    ...asked,
    model,
    prompt: "What is the weather in Paris?",
    tools: { weather },
    stopWhen: isStepCount(2),
    // The first request has to call the tool.
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : { type: "tool", toolName: "weather" } }),
  };
  const { steps } = await generateText(round);
  assert.equal(steps.length, 2);
  assert.equal(steps[0].toolResults.length, 1);
  assert.ok(steps[1].text);
  const events = streamText(round);
  for await (const part of events.fullStream) assert.notEqual(part.type, "error");
  assert.equal((await events.steps)[1].text, steps[1].text);
  console.log(`works: a tool's whole round over ${api}, whole and streamed`);
}
