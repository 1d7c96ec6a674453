// OpenAI's own client for JavaScript: what it sees, as JSON. node openai.mjs BASE_URL
import OpenAI from 'openai';

const client = new OpenAI({baseURL: process.argv[2], apiKey: 'none', maxRetries: 0});
const model = (await client.models.list()).data[0].id;
const messages = [{role: 'user', content: 'Name three colours.'}];
const ask = {model, messages, max_tokens: 24, temperature: 0};
const seen = {};

const whole = await client.chat.completions.create(ask);
seen.whole = whole.choices[0].message.content;
seen.tokens = whole.usage.completion_tokens;

seen.streamed = '';
for await (const chunk of await client.chat.completions.create({...ask, stream: true})) {
  seen.streamed += chunk.choices[0]?.delta?.content ?? '';
}
seen.responses = (await client.responses.create({
  model, input: messages[0].content, max_output_tokens: 24, temperature: 0,
})).output_text;

const aborted = await client.chat.completions.create({...ask, max_tokens: 400, stream: true});
seen.pieces = 0;
for await (const _ of aborted) if (++seen.pieces === 3) aborted.controller.abort();

try {
  await client.chat.completions.create({...ask, top_p: 3});
} catch (error) {
  seen.error = {type: error.constructor.name, status: error.status, message: error.message};
}
console.log(JSON.stringify(seen));
