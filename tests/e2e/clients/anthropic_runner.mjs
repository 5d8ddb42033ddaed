// Run by test_installed_clients beside node_modules with Anthropic's SDK: its tool runner, plain and streamed.
import Anthropic from "@anthropic-ai/sdk";

const [baseURL, model] = process.argv.slice(2);
const content = '@@@<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>%%%It says: $RESULT@@@';
const weather = {
  type: "custom",
  name: "weather",
  description: "Tells the weather.",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  parse: (input) => input,
  run: async ({ city }) => `rain in ${city}`,
};
const client = new Anthropic({ baseURL, apiKey: "dummy", maxRetries: 0 });
for (const stream of [false, true]) {
  const messages = [{ role: "user", content }];
  const runner = client.beta.messages.toolRunner({ model, max_tokens: 1000, tools: [weather], messages, stream });
  console.log(stream ? "streamed" : "plain", (await runner.runUntilDone()).content[0].text);
}
