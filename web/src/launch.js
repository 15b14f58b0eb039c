// Code that launches the kernel from other programs.
const pythonType = ({ dtype, shape }) => `("${dtype}", (${shape.join(', ')}${shape.length === 1 ? ',' : ''}))`;
const pythonString = (text) => (text.includes('\n') ? `"""\n${text.replaceAll('\\', '\\\\').replaceAll('"""', '\\"\\"\\"')}\n"""` : JSON.stringify(text));

function pythonValue(value) {
  if (value === null) return 'None';
  if (typeof value === 'boolean') return value ? 'True' : 'False';
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(', ')}]`;
  if (typeof value === 'object') return `{${Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${pythonValue(each)}`).join(', ')}}`;
  return JSON.stringify(value);
}

function python({ expression, inputs, outputs, target, hardware, options }) {
  const types = Object.entries(inputs).map(([name, type]) => `        "${name}": ${pythonType(type)},`);
  const others = Object.entries({ ...(outputs && { outputs }), ...options }).map(([name, value]) => `    ${name}=${pythonValue(value)},\n`);
  const call = Object.keys(inputs).map((name) => `"${name}": ${name}`).join(', ');
  return `import roller_svc

kernel = roller_svc.compile(
    ${pythonString(expression)},
    inputs={
${types.join('\n')}
    },
    ${hardware ? 'hardware=spec,  # the changed spec: YAML or JSON text' : `target=${JSON.stringify(target)}`},
${others.join('')})
results = kernel.run({${call}})`;
}

const server = () => (location.protocol.startsWith('http') ? location.origin : '$ROLLER_SERVER');
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const HEADERS = '-H "Authorization: Bearer $ROLLER_API_KEY"';
const curl = (body) => `curl -s "${server()}/v1/kernels:compile" ${HEADERS} \\
  -H 'Content-Type: application/json' -H 'Prefer: wait=60' \\
  -d ${quoted(JSON.stringify(body))}`;

// The service's bundle has the launcher, which needs nothing of this project.
const fetched = (digest, launcher) => `curl -s "${server()}/v1/kernels/${digest}/bundle?launcher=${launcher}" ${HEADERS} -o kernel.zip
unzip -q kernel.zip -d kernel`;
const called = (body) => `# with kernel/ in sys.path
import launch

results = launch.Kernel()(${Object.keys(body.inputs).map((name) => `${name}=${name}`).join(', ')})`;
const inPython = (launcher) => (digest, body) => `${fetched(digest, launcher)}\n\n${called(body)}`;
const inCpp = (header, lines) => (digest, body, name) => `${fetched(digest, 'cpp')}\n\n#include "kernel/${header}"\n${lines(name)}`;
const ON_CPU = {
  ctypes: inPython('ctypes'),
  torch: inPython('torch'),
  'c++': inCpp('kernel.h', (name) => `// ${name}_run(...) takes the addresses of inputs and results`),
};
const ON_GPU = {
  cupy: inPython('cupy'),
  torch: inPython('torch'),
  'c++': inCpp('launch.hpp', (name) => `${name}_launcher kernel;  // then kernel.load(image) and kernel.launch(addresses..., stream)`),
};

// By name; those that need the compiled kernel are there once it is.
export function launchCodes(body, kernel) {
  const codes = { python: python(body), curl: curl(body) };
  if (!kernel) return codes;
  const name = kernel.launches[0].name.replace(/_kernel\d+$/, '');
  const makers = Object.entries(kernel.language === 'c' ? ON_CPU : ON_GPU);
  return { ...codes, ...Object.fromEntries(makers.map(([launcher, make]) => [launcher, make(kernel.digest, body, name)])) };
}
