// Vercel's AI SDK with @ai-sdk/openai: responses, which is what it takes by default.

import { createOpenAI } from '@ai-sdk/openai';
import { KEY, SLOW_URL, URL } from './flows.mjs';
import { runAiSdk } from './ai_sdk.mjs';

runAiSdk('@ai-sdk/openai', createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY }), createOpenAI({ baseURL: `${SLOW_URL}/v1`, apiKey: KEY }));
