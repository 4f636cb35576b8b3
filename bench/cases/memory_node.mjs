// node-llama-cpp reads a header and estimates one load on the CPU, as it recommends: by its engine's dry run.
// argv[2]: the folder whose node_modules has it; argv[3]: the model file. Prints JSON.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const require = createRequire(process.argv[2] + "/");
const entry = require.resolve("node-llama-cpp");
const {getLlama, readGgufFileInfo, GgufInsights} = await import(pathToFileURL(entry));
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: "disabled"});
const began = performance.now();
const insights = await GgufInsights.from(await readGgufFileInfo(process.argv[3], {logWarnings: false}), llama);
const model = await insights.estimateModelResourceRequirementsV2({gpuLayers: 0, useMmap: false});
const context = await insights.estimateContextResourceRequirementsV2({
    contextSize: 8192, batchSize: 512, sequences: 1, modelGpuLayers: 0, flashAttention: true, useMmap: false
});
const workS = (performance.now() - began) / 1000;
const {user, system} = process.cpuUsage();
process.stdout.write(JSON.stringify({
    work_s: workS, cpu_s: (user + system) / 1e6, peak_bytes: process.resourceUsage().maxRSS * 1024, total_bytes: model.cpuRam + context.cpuRam
}));
process.exit(0);
