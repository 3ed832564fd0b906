// Vercel's AI SDK with @ai-sdk/openai: responses, which is what it takes by default. It sends earlier answers as
// references to stored items (item_reference), so the mesh has to store responses.

import { createOpenAI } from '@ai-sdk/openai';
import { KEY, SLOW_URL, URL } from './flows.mjs';
import { runAiSdk } from './ai_sdk.mjs';

const fast = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const slow = createOpenAI({ baseURL: `${SLOW_URL}/v1`, apiKey: KEY });
runAiSdk('@ai-sdk/openai', fast, slow);
