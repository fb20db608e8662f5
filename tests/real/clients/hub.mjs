// What users of @huggingface/hub do; prints how each call ended. Needs HF_ENDPOINT, and the package in $NODE_MODULES.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const find = createRequire(process.env.NODE_MODULES + "/");
const hub = await import(pathToFileURL(find.resolve("@huggingface/hub")));
const hubUrl = process.env.HF_ENDPOINT;
const repo = { type: "model", name: "team/chat" };
const all = async (items) => { const found = []; for await (const item of items) found.push(item); return found; };
const calls = {
  info: async () => { const one = await hub.modelInfo({ name: repo.name, hubUrl, additionalFields: ["library_name", "tags", "safetensors", "config"] }); return [one.name, one.task, one.library_name]; },
  list: async () => (await all(hub.listModels({ search: { owner: "team", task: "text-generation", tags: ["tiny"] }, hubUrl }))).map((one) => [one.name, one.task, one.downloads]),
  files: async () => (await all(hub.listFiles({ repo, recursive: true, expand: true, hubUrl }))).map((one) => [one.path, one.lastCommit?.title]),
  paths: async () => (await hub.pathsInfo({ repo, paths: ["config.json", "none"], expand: true, hubUrl })).map((one) => one.path),
  exists: async () => [await hub.fileExists({ repo, path: "config.json", hubUrl }), await hub.fileExists({ repo, path: "none", hubUrl })],
  download: async () => (await (await hub.downloadFile({ repo, path: "config.json", hubUrl })).text()).length,
  xet: async () => (await (await hub.downloadFile({ repo, path: "model.safetensors", xet: true, hubUrl })).arrayBuffer()).byteLength,
  raw: async () => (await (await hub.downloadFile({ repo, path: "config.json", raw: true, hubUrl })).text()).length,
  fileInfo: async () => Object.keys(await hub.fileDownloadInfo({ repo, path: "model.safetensors", hubUrl })),
  snapshot: async () => (await hub.snapshotDownload({ repo, hubUrl, cacheDir: process.env.HF_HOME + "/js" })).length > 0,
  safetensors: async () => (await hub.parseSafetensorsMetadata({ repo: repo.name, hubUrl, computeParametersCount: true })).parameterCount,
  commits: async () => (await all(hub.listCommits({ repo, hubUrl }))).map((one) => one.title),
  access: async () => hub.checkRepoAccess({ repo, hubUrl }),
  "access to none": async () => hub.checkRepoAccess({ repo: { type: "model", name: "team/none" }, hubUrl }),
  whoami: async () => (await hub.whoAmI({ accessToken: "hf_any", hubUrl })).name,
};
for (const [name, call] of Object.entries(calls)) {
  try { console.log(name + ":", JSON.stringify(await call())); } catch (error) { console.log(name + ":", error.constructor.name, error.statusCode, String(error.message).slice(0, 150)); }
}
