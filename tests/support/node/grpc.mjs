// A client that knows the .proto files only: what it sees, as JSON. node grpc.mjs ADDRESS PROTOS
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const [address, protos] = process.argv.slice(2);
const definition = loader.loadSync('triptych/v1/inference.proto', {
  includeDirs: [protos], keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true,
});
const {InferenceService} = grpc.loadPackageDefinition(definition).triptych.v1;
const client = new InferenceService(address, grpc.credentials.createInsecure());
const request = (max_tokens, more) => ({
  text: 'Once upon a time', sampling_params: {max_tokens, seed: 1, ignore_eos: true, ...more},
});
const seen = {};

async function read(call, stop = Infinity) {
  const answer = {text: '', token_ids: [], pieces: 0};
  try {
    for await (const piece of call) {
      answer.text += piece.text;
      answer.token_ids.push(...piece.token_ids);
      if (piece.usage) answer.usage = piece.usage;
      if (++answer.pieces === stop) call.cancel();
    }
  } catch (error) {
    answer.code = grpc.status[error.code];
    answer.details = error.details;
  }
  return answer;
}

seen.whole = await read(client.generate(request(48)));
// More than the connection holds unread: it cannot be whole before it is cancelled.
seen.cancelled = await read(client.generate(request(900, {logprobs: 20})), 3);
seen.late = await read(client.generate(request(400), {deadline: Date.now() + 20}));
seen.refused = await read(client.generate(request(1, {top_p: 1.5})));

const session = client.session();
for (let id = 1; id <= 4; id++) session.write({start: {id, generate: request(16)}});
session.end();
seen.session = {};
for await (const {events} of session) {
  for (const {id, output} of events) {
    seen.session[id] = (seen.session[id] ?? []).concat(output.token_ids);
  }
}
client.close();
console.log(JSON.stringify(seen));
