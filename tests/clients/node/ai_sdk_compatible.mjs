// Vercel's AI SDK with @ai-sdk/openai-compatible, as one sets it up for a server of one's own.

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { KEY, SLOW_URL, URL } from './flows.mjs';
import { runAiSdk } from './ai_sdk.mjs';

const provider = (url) =>
  createOpenAICompatible({ name: 'kvmesh', baseURL: `${url}/v1`, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true });
runAiSdk('@ai-sdk/openai-compatible', provider(URL), provider(SLOW_URL));
