// Vercel's AI SDK: generateText, streamText and a structured answer with the provider for OpenAI-compatible servers,
// generateText with OpenAI's own provider (responses) and with Anthropic's (messages).
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText } from "ai";
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
