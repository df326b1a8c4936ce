// What unmodified @grpc/grpc-js gets: `grpc_js_script.js ADDRESS TASK PROTOS SET`.
//
// PROTOS is a folder with the .proto files. SET, a descriptor set, has health and the details of
// errors: what is loaded from such a set has lists where messages have maps. It prints one line of
// JSON, and ends when its standard input does.
"use strict";

const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, task, protos, set] = process.argv.slice(2);
const FORM = { keepCase: true, longs: String, enums: String, oneofs: true, defaults: true };
const FILES = ["cupaged/v1/generation.proto", "cupaged/v1/model.proto", "kserve.proto"];
const PROMPT = "The memory of a process";
const GREEDY = { temperature: 0 };
const LONG = { text: PROMPT, stopping: { max_new_tokens: 900, ignore_eos: true } };
const { CANCELLED, DEADLINE_EXCEEDED } = grpc.status;

const ofFiles = loader.loadSync(FILES, { ...FORM, includeDirs: [protos] });
const ofSet = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(set), FORM);
const { cupaged, inference } = grpc.loadPackageDefinition(ofFiles);
const { Health } = grpc.loadPackageDefinition(ofSet).grpc.health.v1;
const connect = (Service) => new Service(address, grpc.credentials.createInsecure());
const generation = connect(cupaged.v1.GenerationService);
const models = connect(cupaged.v1.ModelService);
const kserve = connect(inference.GRPCInferenceService);
const health = connect(Health);

function asked(changes = {}) {
  const stopping = { max_new_tokens: 6, ignore_eos: true };
  return { text: PROMPT, sampling: GREEDY, stopping, ...changes };
}

// The answer to a unary call, with the metadata that came before it; or the error.
function call(client, method, request, ...options) {
  return new Promise((resolve) => {
    let metadata = null;
    const made = client[method](request, ...options, (error, response) =>
      resolve({ error, response, metadata }),
    );
    made.on("metadata", (came) => (metadata = came.getMap()));
  });
}

// The messages of a stream up to its end, and the error if it has one.
function read(stream, onMessage = () => {}) {
  return new Promise((resolve) => {
    const messages = [];
    stream.on("data", (message) => {
      messages.push(message);
      onMessage(message, stream);
    });
    stream.on("error", (error) => resolve({ messages, error }));
    stream.on("end", () => resolve({ messages, error: null }));
  });
}

// A failure, with its details by the names of their types.
function told(error) {
  const [data] = error.metadata.get("grpc-status-details-bin");
  const details = {};
  if (data !== undefined) {
    for (const any of ofSet["google.rpc.Status"].deserialize(data).details) {
      const name = any.type_url.split("/").pop();
      details[name] = ofSet[name].deserialize(any.value);
    }
  }
  return { code: error.code, message: error.details, details };
}

// A ModelInferRequest of six tokens, with typed values.
function infer(id, text, changes = {}) {
  const sampling = { ...GREEDY, max_tokens: 6, ignore_eos: true, ...changes };
  const bytes = (name, value) => ({
    name, datatype: "BYTES", shape: [1], contents: { bytes_contents: [Buffer.from(value)] },
  });
  const flag = (name) => ({
    name, datatype: "BOOL", shape: [1], contents: { bool_contents: [true] },
  });
  const inputs = [bytes("text_input", text), flag("stream"), flag("exclude_input_in_output")];
  inputs.push(bytes("sampling_parameters", JSON.stringify(sampling)));
  return { model_name: "tiny", id, inputs };
}

function part(message) {
  const { id, outputs, parameters } = message.infer_response;
  const final = parameters.triton_final_response.bool_param;
  const text = outputs.map((output) => output.contents.bytes_contents[0].toString()).join("");
  return { id, text, final, error: message.error_message };
}

const tasks = {
  async unary() {
    const request = asked({ request_id: "mine" });
    const { response, metadata } = await call(generation, "Generate", request);
    const chat = { messages: [{ role: "user", content: "Hello" }] };
    const rendered = await call(generation, "ApplyChatTemplate", { chat });
    const { response: listed } = await call(models, "ListModels", {});
    return {
      id: response.request_id, header: metadata["x-request-id"], sample: response.samples[0],
      prompt_tokens: response.usage.prompt_tokens, chat: rendered.response.text,
      model: listed.models[0].name, parameters: listed.models[0].num_parameters,
    };
  },

  async stream() {
    const { messages, error } = await read(generation.GenerateStream(asked()));
    const kinds = messages.map((message) => message.event);
    const text = messages.map((message) => message.delta?.text ?? "").join("");
    const { finished, usage } = messages.at(-1);
    return { error, kinds, text, reason: finished.reason, tokens: usage.completion_tokens };
  },

  // Two requests and one that is wrong on one stream; then the stream goes on.
  async infer() {
    const stream = kserve.ModelStreamInfer();
    let finals = 0;
    const reading = read(stream, (message) => {
      if (!part(message).final) return;
      finals += 1;
      if (finals === 3) stream.write(infer("d", PROMPT));
      if (finals === 4) stream.end();
    });
    stream.write(infer("a", PROMPT));
    stream.write(infer("bad", PROMPT, { temperature: -1 }));
    stream.write(infer("b", PROMPT + " x"));
    const { messages, error } = await reading;
    return { error, parts: messages.map(part) };
  },

  async refused() {
    const bad = asked({ sampling: { temperature: -1 }, stopping: { stop: ["a", ""] } });
    const unary = await call(generation, "Generate", bad);
    const streamed = await read(generation.GenerateStream(bad));
    const unknown = await call(generation, "Generate", asked({ model: "other" }));
    return [unary, streamed, unknown].map(({ error }) => told(error));
  },

  async overload() {
    const { error } = await call(generation, "Generate", asked());
    return { ...told(error), pushback: error.metadata.get("grpc-retry-pushback-ms") };
  },

  async cancel() {
    let made;
    const unary = new Promise((resolve) => {
      made = generation.Generate(LONG, (error) => resolve(error.code));
    });
    while ((await call(models, "GetLoad", {})).response.load.num_running === 0) {
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    made.cancel();
    const streamed = read(generation.GenerateStream(LONG), (message, stream) => {
      if (message.delta) stream.cancel();
    });
    const both = kserve.ModelStreamInfer();
    const seen = new Set();
    const shared = read(both, (message) => {
      if (seen.add(message.infer_response.id).size === 2) both.cancel();
    });
    for (const id of ["a", "b"]) both.write(infer(id, PROMPT, { max_tokens: 900 }));
    const codes = [await unary, (await streamed).error.code, (await shared).error.code];
    return { cancelled: codes.every((code) => code === CANCELLED), ids: [...seen].sort() };
  },

  async deadline() {
    const options = () => ({ deadline: Date.now() + 5000 }); // by then the engine has the request
    const [unary, streamed] = await Promise.all([
      call(generation, "Generate", LONG, options()),
      read(generation.GenerateStream(LONG, options())),
    ]);
    return {
      exceeded: [unary, streamed].every(({ error }) => error.code === DEADLINE_EXCEEDED),
      deltas: streamed.messages.filter((message) => message.delta).length,
    };
  },

  async token() {
    const bearer = new grpc.Metadata();
    bearer.set("authorization", "Bearer word");
    const without = await call(generation, "Generate", asked());
    const inferred = await call(kserve, "ServerLive", {});
    const withIt = await call(generation, "Generate", asked(), bearer);
    const live = await call(kserve, "ServerLive", {}, bearer);
    const state = await call(health, "Check", { service: "cupaged.v1.GenerationService" });
    return {
      without: [without, inferred].map(({ error }) => told(error)),
      tokens: withIt.response.usage.completion_tokens, live: live.response.live,
      health: state.response.status,
    };
  },
};

tasks[task]().then((answer) => console.log(JSON.stringify(answer)));
process.stdin.resume().on("end", () => process.exit(0));
